// Threadgroup memory, and the checks of every access in instrumented kernels: bounds, alignment, initialisation, races.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "state.h"

static const char *verb(const Site &site) { return site.is_store ? "store" : "load"; }

void reset_threadgroup_memory() {
  memset(group.arena, 0xFF, group.arena_top);  // reads as NaN in every float type
  memset(group.arena_state, 0, group.arena_top);
  memset(group.variables, 0, sizeof group.variables);
  group.arena_top = group.arena_used = 0;
}

static const Variable *variable_at(u64 offset) {
  const Variable *nearest = nullptr;
  u64 best = ~0ull;
  for (const Variable &v : group.variables) {
    if (!v.used) continue;
    u64 distance = offset < v.offset             ? v.offset - offset
                   : offset >= v.offset + v.size ? offset - v.offset - v.size + 1
                                                 : 0;
    if (distance < best) best = distance, nearest = &v;
  }
  return nearest;
}

static u32 threadgroup_of(u32 id) { return id / MAX_THREADS; }  // counted from the first that runs
static u32 simdgroup_of(u32 id) { return id / SIMD_WIDTH; }

// Did a barrier order what `other` did at `then` before what `me` does now?
static bool ordered(u32 other, Readers who, Clock then, const Lane *me, Clock now) {
  if (who == MANY || threadgroup_of(other) != threadgroup_of(me->id)) return false;
  if (then.group < now.group) return true;
  return who != ONE_THREADGROUP && simdgroup_of(other) == simdgroup_of(me->id) && then.simd < now.simd;
}

static void race(const Site &site, const char *name, u64 byte, u32 other, Readers who) {
  if (site.space == THREADGROUP) {
    const Variable *v = variable_at(byte);
    name = v->name;
    byte -= v->offset;
  }
  char culprit[64] = "several threads";
  if (who == ONE_THREAD)
    snprintf(culprit, sizeof culprit, "thread %u of threadgroup %lu", other % MAX_THREADS,
             (unsigned long)(group.first + threadgroup_of(other)));
  ISSUE(group.current,
        "line %u:%u: data race on %s memory '%s' at byte %lu: this %s is not ordered with an access by %s", site.line,
        site.column, site.space == THREADGROUP ? "threadgroup" : "device", name, (unsigned long)byte, verb(site),
        culprit);
}

static void add_reader(Cell &cell, const Lane *me, Clock now) {
  bool alone = cell.readers == NOBODY || (cell.readers == ONE_THREAD && cell.reader == me->id);
  if (alone || ordered(cell.reader, cell.readers, cell.read, me, now)) {
    cell.readers = ONE_THREAD;
    cell.reader = me->id;
    cell.read = now;
    return;
  }
  if (cell.readers <= ONE_SIMDGROUP && simdgroup_of(cell.reader) == simdgroup_of(me->id))
    cell.readers = ONE_SIMDGROUP;
  else if (cell.readers <= ONE_THREADGROUP && threadgroup_of(cell.reader) == threadgroup_of(me->id))
    cell.readers = ONE_THREADGROUP;
  else
    cell.readers = MANY;
  if (now.group > cell.read.group || (now.group == cell.read.group && now.simd > cell.read.simd)) cell.read = now;
}

// `cells`: the first of `count` cells, `stride` apart
static void check_race(Cell *cells, u64 count, u32 stride, u32 generation, const Site &site, Clock now,
                       const char *name, u64 byte) {
  Lane *me = group.current;
  for (u64 i = 0; i < count; ++i) {
    Cell &cell = cells[i * stride];
    if (cell.generation != generation) cell = {generation, 0, {0, 0}, 0, NOBODY, {0, 0}};
    if (cell.writer && cell.writer - 1 != me->id && !ordered(cell.writer - 1, ONE_THREAD, cell.written, me, now))
      race(site, name, byte, cell.writer - 1, ONE_THREAD);
    if (!site.is_store) {
      add_reader(cell, me, now);
      continue;
    }
    bool mine = cell.readers == NOBODY || (cell.readers == ONE_THREAD && cell.reader == me->id);
    if (!mine && !ordered(cell.reader, cell.readers, cell.read, me, now))
      race(site, name, byte, cell.reader, cell.readers);
    cell.writer = me->id + 1;
    cell.written = now;
    cell.readers = NOBODY;
  }
}

static void check_threadgroup(const u8 *address, const Site &site, bool races) {
  u64 offset = (u64)(address - group.arena);
  if (address < group.arena || offset + site.size > ARENA_BYTES)
    fail("line %u:%u: threadgroup %s outside threadgroup memory", site.line, site.column, verb(site));
  u8 *state = group.arena_state + offset;
  u32 shift = state[0] >> ELEMENT_SHIFT;
  bool outside = false, uninitialised = false;
  for (u32 i = 0; i < site.size; ++i) {
    outside |= state[i] == OUTSIDE;
    uninitialised |= !(state[i] & INITIALISED);
  }
  if (outside || (uninitialised && !site.is_store)) {
    const Variable *v = variable_at(offset);  // at least one exists, or there would be no pointer
    long byte = (long)offset - (long)v->offset;
    if (outside)
      fail("line %u:%u: out-of-bounds threadgroup %s: byte %ld of '%s' (%lu bytes)", site.line, site.column, verb(site),
           byte, v->name, (unsigned long)v->size);
    ISSUE(group.current, "line %u:%u: read of uninitialised threadgroup memory: byte %ld of '%s'", site.line,
          site.column, byte, v->name);
  }
  if (site.is_store)
    for (u32 i = 0; i < site.size; ++i) state[i] |= INITIALISED;
  if (races) {
    u64 first = offset >> shift, last = (offset + site.size - 1) >> shift;
    check_race(group.arena_cells + (first << shift), last - first + 1, 1u << shift, group.generation, site,
               group.current->threadgroup_clock, nullptr, offset);
  }
}

static Buffer *buffer_at(const u8 *address, const Site &site) {
  Launch *launch = group.launch;
  Buffer *last = launch->buffers + group.last_buffer;
  if (address >= last->base && address < last->base + last->bytes) return last;
  Buffer *nearest = nullptr;
  u64 best = ~0ull;
  for (u32 i = 0; i < launch->n_buffers; ++i) {
    Buffer *b = launch->buffers + i;
    if (address >= b->base && address < b->base + b->bytes) {
      group.last_buffer = i;
      return b;
    }
    u64 distance = address < b->base ? (u64)(b->base - address) : (u64)(address - b->base) - b->bytes;
    if (distance < best) best = distance, nearest = b;
  }
  if (!nearest) fail("line %u:%u: device %s without any buffer", site.line, site.column, verb(site));
  long bytes = (long)(address - nearest->base), item = (long)nearest->item_size;
  fail("line %u:%u: out-of-bounds device %s: element %ld of '%s' (%lu elements)", site.line, site.column, verb(site),
       bytes >= 0 ? bytes / item : -((-bytes + item - 1) / item), nearest->name,
       (unsigned long)(nearest->bytes / nearest->item_size));
}

static void check_device(const u8 *address, const Site &site, bool races) {
  Buffer *b = buffer_at(address, site);
  u64 offset = (u64)(address - b->base), element = offset / b->item_size;
  if (offset + site.size > b->bytes)
    fail("line %u:%u: out-of-bounds device %s: %u bytes at element %lu of '%s' (%lu elements)", site.line, site.column,
         verb(site), site.size, (unsigned long)element, b->name, (unsigned long)(b->bytes / b->item_size));
  u8 *state = b->state + offset;
  if (site.is_store) {
    if (!b->is_output) fail("line %u:%u: store to input '%s'", site.line, site.column, b->name);
    b->stored += site.size;
    for (u32 i = 0; i < site.size; ++i) {
      b->unique_stored += !(state[i] & WRITTEN);
      state[i] |= VALID | WRITTEN;
    }
    if (site.float_bytes) group.pending = {address, &site, b, group.current};
  } else {
    b->loaded += site.size;
    u8 all = b->is_whole ? VALID : 0xFF;
    for (u32 i = 0; i < site.size; ++i) {
      all &= state[i] | (b->is_whole ? VALID : 0);
      b->unique_loaded += !(state[i] & READ);
      state[i] |= READ;
    }
    if (!b->is_output && !(all & VALID))
      ISSUE(group.current, "line %u:%u: read of memory between the elements of the strided input '%s': offset %lu",
            site.line, site.column, b->name, (unsigned long)element);
    if (b->is_output && !(all & VALID))
      ISSUE(group.current, "line %u:%u: read of uninitialised output '%s' element %lu", site.line, site.column, b->name,
            (unsigned long)element);
  }
  if (b->is_output && races) {
    u64 last = (offset + site.size - 1) / b->item_size;
    check_race(group.buffer_cells[b - group.launch->buffers] + element, last - element + 1, 1, 1, site,
               group.current->device_clock, b->name, offset);
  }
}

// All ones is what the compiler puts into uninitialised variables: a NaN that arithmetic on anything else never gives.
void check_pending_store() {
  PendingStore store = group.pending;
  group.pending.address = nullptr;
  if (!store.address) return;
  for (u32 i = 0; i < store.site->size; i += store.site->float_bytes) {
    bool ones = true;
    for (u32 k = 0; k < store.site->float_bytes; ++k) ones &= store.address[i + k] == 0xFF;
    if (ones)
      ISSUE(store.lane, "line %u:%u: the value stored to element %lu of '%s' comes from an uninitialised variable",
            store.site->line, store.site->column,
            (unsigned long)((u64)(store.address + i - store.buffer->base) / store.buffer->item_size),
            store.buffer->name);
  }
}

static void check_access(const void *address, const Site &site, bool races) {
  if (site.align > 1 && ((u64)address & (site.align - 1)))
    fail("line %u:%u: misaligned %u-byte %s: the address is not a multiple of %u", site.line, site.column, site.size,
         verb(site), site.align);
  if (site.space == THREADGROUP)
    check_threadgroup((const u8 *)address, site, races);
  else
    check_device((const u8 *)address, site, races);
}

// Threads switch only at barriers and SIMD functions: one that polls memory for another's message would never end.
static void count_step(const Site &site) {
  if (++group.steps > MAX_STEPS)
    fail("line %u:%u: %u million accesses by one thread without a barrier: does it wait for another thread?", site.line,
         site.column, MAX_STEPS >> 20);
}

extern "C" {

// element: size of the scalars it consists of, a power of two
void *mtl_threadgroup_variable(u32 id, u64 size, u64 align, u32 element, const char *name, u32 is_zeroed, u32 site) {
  if (id >= MAX_VARIABLES) fail("line %u:%u: more than %u threadgroup variables", POSITION(site), MAX_VARIABLES);
  Variable &v = group.variables[id];
  if (v.used) return group.arena + v.offset;
  if (align < 16) align = 16;
  group.arena_used = (group.arena_used + align - 1) / align * align + size;
  Launch *launch = group.launch;
  if (group.arena_used > launch->threadgroup_bytes) launch->threadgroup_bytes = (u32)group.arena_used;
  if (group.arena_used > launch->threadgroup_limit)
    fail("line %u:%u: threadgroup memory: '%s' brings the total to %lu bytes; the limit is %u", POSITION(site), name,
         (unsigned long)group.arena_used, launch->threadgroup_limit);
  u64 offset = (group.arena_top + 127) / 128 * 128 + 64;  // red zones of 64 bytes or more
  group.arena_top = offset + size + 64;
  if (group.arena_top > ARENA_BYTES)
    fail("line %u:%u: '%s' does not fit the emulator's threadgroup memory", POSITION(site), name);
  v = {true, offset, size, name};
  u8 state = (u8)(__builtin_ctz(element) << ELEMENT_SHIFT | INSIDE | (is_zeroed ? INITIALISED : 0));
  memset(group.arena_state + offset, state, size);
  if (is_zeroed) memset(group.arena + offset, 0, size);
  return group.arena + offset;
}

void mtl_check(const void *address, u32 site) {
  group.launch->site_counts[site]++;
  count_step(group.launch->sites[site]);
  check_pending_store();
  check_access(address, group.launch->sites[site], true);
}

// memcpy, memmove and memset: like mtl_check, with the length known only now
void mtl_check_range(const void *address, u64 size, u32 site) {
  group.launch->site_counts[site]++;
  check_pending_store();
  Site s = group.launch->sites[site];
  s.size = (u32)size;
  check_access(address, s, true);
}

// is_load and is_store: an exchange is both. Atomics do not race.
void mtl_check_atomic(const void *address, u32 size, u32 space, u32 is_load, u32 is_store, u32 site) {
  group.launch->atomics++;
  Site s = {size, size, space, 0, 0, POSITION(site)};
  count_step(s);
  if (!group.launch->check) return;
  if (is_load) check_access(address, s, false);
  s.is_store = 1;
  if (is_store) check_access(address, s, false);
}

void mtl_count_math(u32 flops, u32 specials) {
  group.launch->flops += flops;
  group.launch->specials += specials;
}
}
