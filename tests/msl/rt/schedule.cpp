// Which fiber runs next; SIMD functions and barriers as rendezvous points.
#include <stdlib.h>
#include <string.h>

#include "state.h"

Group group;

// Saves the callee-saved registers on the old stack and restores them from the new one.
asm(R"(.text
.globl mtl_switch
.type mtl_switch,@function
mtl_switch:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp,(%rdi)
  movq %rsi,%rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  ret
)");

static bool lanes_descend() { return group.launch->order & 1; }
static bool simdgroups_descend() { return group.launch->order & 2; }

static u32 runnable(const SimdGroup &s) { return s.alive & ~(s.at_simd | s.at_barrier | s.at_simd_barrier); }
static Lane *lane_of(const SimdGroup &s, u32 lane) { return group.lanes + s.first + lane; }
static Lane *lowest(const SimdGroup &s, u32 mask) { return lane_of(s, (u32)__builtin_ctz(mask)); }
static u32 full_mask(const SimdGroup &s) { return s.size == SIMD_WIDTH ? ~0u : (1u << s.size) - 1; }

static void jump(Lane *to) {
  Lane *from = group.current;
  if (to == from) return;
  group.current = to;
  group.steps = 0;
  mtl_switch(&from->stack_pointer, to->stack_pointer);
}

static void complete_simd(SimdGroup &s, u32 mask) {
  Lane *leader = lowest(s, mask);
  s.exchange.mask = mask;
  s.exchange.ready = 0;
  group.launch->simd_ops++;
  for (u32 rest = mask; rest; rest &= rest - 1) {
    u32 i = (u32)__builtin_ctz(rest);
    Lane *lane = lane_of(s, i);
    if (lane->uniform != leader->uniform)
      ISSUE(lane,
            "line %u:%u: SIMD function called with an argument (delta, mask or lane) that differs between lanes: %d "
            "and %d",
            POSITION(lane->site), leader->uniform, lane->uniform);
    memcpy(s.exchange.slot[i], lane->value, leader->value_size <= 4 ? 4 : leader->value_size <= 8 ? 8 : 32);
    lane->exchange = &s.exchange;
    lane->state = RUNNING;
  }
  s.at_simd &= ~mask;
}

static bool same_call(const Lane *a, const Lane *b) {
  return a->site == b->site && a->op == b->op && a->caller == b->caller;
}

// All live lanes of a SIMD-group wait at SIMD functions. If not at the same one, the code diverged; with strict=False
// those at the first place in the source go first.
static void simd_ready(SimdGroup &s) {
  if (s.alive != full_mask(s)) {
    Lane *lane = lowest(s, s.at_simd);
    if (group.warned_site != lane->site) {
      group.warned_site = lane->site;
      ISSUE(lane, "line %u:%u: SIMD function reached by %d of %u lanes (the others returned)", POSITION(lane->site),
            __builtin_popcount(s.alive), s.size);
    }
  }
  Lane *first = lowest(s, s.at_simd);
  u32 together = 0;
  for (u32 rest = s.at_simd; rest; rest &= rest - 1) {
    Lane *lane = lowest(s, rest);
    if (!same_call(lane, first)) {
      ISSUE(lane, "divergent SIMD-group function: lane %u at line %u:%u, lane %u at line %u:%u%s", first->lane,
            POSITION(first->site), lane->lane, POSITION(lane->site),
            first->site == lane->site ? " (through different calls)" : "");
      if (lane->site < first->site) first = lane;
    }
  }
  for (u32 rest = s.at_simd; rest; rest &= rest - 1)
    if (same_call(lowest(s, rest), first)) together |= rest & -rest;
  complete_simd(s, together);
}

static void pass_simdgroup_barrier(SimdGroup &s) {
  group.launch->simdgroup_barriers++;
  for (u32 rest = s.at_simd_barrier; rest; rest &= rest - 1) {
    Lane *lane = lowest(s, rest);
    lane->state = RUNNING;
    if (lane->flags & MEM_THREADGROUP) lane->threadgroup_clock.simd++;
    if (lane->flags & MEM_DEVICE) lane->device_clock.simd++;
  }
  s.at_simd_barrier = 0;
}

static void pass_barrier() {
  Lane *first = nullptr;
  for (u32 i = 0; i < group.n_threads; ++i) {
    Lane *lane = group.lanes + i;
    if (lane->state != AT_BARRIER) continue;
    if (!first) first = lane;
    if (lane->site != first->site || lane->caller != first->caller)
      ISSUE(lane, "divergent threadgroup_barrier: thread %u waits at line %u:%u, thread %u at line %u:%u%s",
            first->thread, POSITION(first->site), lane->thread, POSITION(lane->site),
            first->site == lane->site ? " (through different calls)" : "");
  }
  group.launch->barriers++;
  for (u32 i = 0; i < group.n_threads; ++i) {
    Lane *lane = group.lanes + i;
    if (lane->state != AT_BARRIER) continue;
    lane->state = RUNNING;
    if (lane->flags & MEM_THREADGROUP) lane->threadgroup_clock = {lane->threadgroup_clock.group + 1, 0};
    if (lane->flags & MEM_DEVICE) lane->device_clock = {lane->device_clock.group + 1, 0};
  }
  for (u32 i = 0; i < group.n_simdgroups; ++i) group.simdgroups[i].at_barrier = 0;
  group.n_at_barrier = 0;
}

// The next runnable lane of the same SIMD-group, then of the next SIMD-groups; null if every thread waits.
static Lane *next_runnable(const Lane *me) {
  const SimdGroup &own = group.simdgroups[me->simdgroup];
  if (u32 mask = runnable(own)) {
    u32 above = me->lane == 31 ? 0 : mask & (~0u << (me->lane + 1)), below = mask & ((1u << me->lane) - 1);
    u32 preferred = lanes_descend() ? below : above;
    if (!preferred) preferred = mask;
    return lane_of(own, lanes_descend() ? 31 - (u32)__builtin_clz(preferred) : (u32)__builtin_ctz(preferred));
  }
  u32 n = group.n_simdgroups, step = simdgroups_descend() ? n - 1 : 1;
  for (u32 k = 1, i = me->simdgroup; k < n; ++k) {
    i = (i + step) % n;
    if (u32 mask = runnable(group.simdgroups[i]))
      return lane_of(group.simdgroups[i], lanes_descend() ? 31 - (u32)__builtin_clz(mask) : (u32)__builtin_ctz(mask));
  }
  return nullptr;
}

// Every live thread waits, but not all for the same thing: report the divergence, then let some go on.
static void resolve_divergence() {
  for (u32 i = 0; i < group.n_simdgroups; ++i) {
    SimdGroup &s = group.simdgroups[i];
    if (!s.at_simd) continue;
    if (u32 others = s.alive & ~s.at_simd) {
      Lane *lane = lowest(s, s.at_simd), *other = lowest(s, others);
      ISSUE(lane,
            "divergent SIMD-group function: lane %u at line %u:%u while lane %u waits at the barrier of line %u:%u",
            lane->lane, POSITION(lane->site), other->lane, POSITION(other->site));
    }
    simd_ready(s);
    return;
  }
  for (u32 i = 0; i < group.n_simdgroups; ++i) {
    SimdGroup &s = group.simdgroups[i];
    if (!s.at_simd_barrier) continue;
    Lane *lane = lowest(s, s.at_simd_barrier);
    ISSUE(lane, "divergent simdgroup_barrier at line %u:%u: reached by %d of %u lanes", POSITION(lane->site),
          __builtin_popcount(s.at_simd_barrier), s.size);
    pass_simdgroup_barrier(s);
    return;
  }
  for (u32 i = 0; i < group.n_threads; ++i) {
    Lane *lane = group.lanes + i;
    if (lane->state != AT_BARRIER) continue;
    ISSUE(lane, "threadgroup_barrier at line %u:%u not reached by %u of %u threads (they returned)",
          POSITION(lane->site), group.n_threads - group.n_at_barrier, group.n_threads);
    pass_barrier();
    return;
  }
  fail("internal error: no thread can run");
}

// Called by a fiber that cannot go on; returns once it may.
void schedule() {
  Lane *me = group.current;
  do {
    if (Lane *next = next_runnable(me)) {
      jump(next);
    } else if (group.n_alive == 0) {
      group.current = nullptr;
      mtl_switch(&me->stack_pointer, group.main_stack_pointer);
    } else {
      resolve_divergence();
    }
  } while (me->state != RUNNING);
}

extern "C" {

Exchange *mtl_simd_enter(const void *value, u32 size, int op, int uniform, void *caller, u32 site) {
  Lane *me = group.current;
  SimdGroup &s = group.simdgroups[me->simdgroup];
  memcpy(me->value, value, size);
  me->value_size = size;
  me->site = site;
  me->caller = caller;
  me->op = op;
  me->uniform = uniform;
  me->state = AT_SIMD;
  s.at_simd |= 1u << me->lane;
  if (s.at_simd == s.alive) simd_ready(s);
  if (me->state != RUNNING) schedule();
  return me->exchange;
}

void mtl_simd_bad_lane(u32 lane, u32 site) {
  ISSUE(group.current, "line %u:%u: SIMD function reads lane %u, which is inactive or does not exist", POSITION(site),
        lane);
}

u32 mtl_simd_lane() { return group.current->lane; }

void mtl_simdgroup_barrier(u32 flags, u32 site) {
  Lane *me = group.current;
  SimdGroup &s = group.simdgroups[me->simdgroup];
  me->site = site;
  me->flags = flags;
  me->state = AT_SIMD_BARRIER;
  s.at_simd_barrier |= 1u << me->lane;
  if (s.at_simd_barrier == s.alive) pass_simdgroup_barrier(s);
  if (me->state != RUNNING) schedule();
}

void mtl_threadgroup_barrier(u32 flags, u32 site) {
  Lane *me = group.current;
  me->site = site;
  me->caller = __builtin_return_address(0);
  me->flags = flags;
  me->state = AT_BARRIER;
  group.simdgroups[me->simdgroup].at_barrier |= 1u << me->lane;
  if (++group.n_at_barrier == group.n_threads) pass_barrier();
  if (me->state != RUNNING) schedule();
}
}

static void fiber_main() {
  Lane *me = group.current;
  group.launch->entry(group.launch->arguments, &me->context);
  SimdGroup &s = group.simdgroups[me->simdgroup];
  check_pending_store();
  me->state = DONE;
  s.alive &= ~(1u << me->lane);
  group.n_alive--;
  if (s.alive && s.at_simd == s.alive) simd_ready(s);
  if (s.alive && s.at_simd_barrier == s.alive) pass_simdgroup_barrier(s);
  schedule();
  abort();  // nothing resumes a fiber that is done
}

static void set_context(Lane *lane, const u32 *tg, const u32 *size, const u32 *count) {
  const u32 *full = group.launch->threadgroup, *grid = group.launch->grid;
  u32 i = lane->thread, n = group.n_threads, n_full = full[0] * full[1] * full[2];
  Context &c = lane->context;
  c.dispatch_quadgroups_per_threadgroup = (n_full + 3) / 4;
  c.dispatch_simdgroups_per_threadgroup = (n_full + 31) / 32;
  c.quadgroup_index_in_threadgroup = i / 4;
  c.quadgroups_per_threadgroup = (n + 3) / 4;
  c.simdgroup_index_in_threadgroup = i / SIMD_WIDTH;
  c.simdgroups_per_threadgroup = (n + 31) / 32;
  c.thread_execution_width = c.threads_per_simdgroup = SIMD_WIDTH;
  c.thread_index_in_quadgroup = i % 4;
  c.thread_index_in_simdgroup = i % SIMD_WIDTH;
  c.thread_index_in_threadgroup = i;
  u32 x = i % size[0], y = i / size[0] % size[1], z = i / (size[0] * size[1]);
  c.thread_position_in_threadgroup = {x, y, z, 0};
  c.thread_position_in_grid = {tg[0] * full[0] + x, tg[1] * full[1] + y, tg[2] * full[2] + z, 0};
  c.threadgroup_position_in_grid = {tg[0], tg[1], tg[2], 0};
  c.threads_per_threadgroup = {size[0], size[1], size[2], 0};
  c.dispatch_threads_per_threadgroup = {full[0], full[1], full[2], 0};
  c.threadgroups_per_grid = {count[0], count[1], count[2], 0};
  c.grid_origin = {0, 0, 0, 0};
  c.grid_size = c.threads_per_grid = {grid[0], grid[1], grid[2], 0};
}

static void prepare_stack(Lane *lane) {
  // stagger the stacks so that they do not all share the same cache sets
  u8 *top = group.stacks + (u64)(lane->thread + 1) * STACK_BYTES - 64 - (u64)(lane->thread % 61) * 448;
  void **sp = (void **)((u64)top & ~63ull);
  *--sp = nullptr;
  *--sp = (void *)fiber_main;
  for (int i = 0; i < 6; ++i) *--sp = nullptr;
  lane->stack_pointer = sp;
}

// Run all threads of one threadgroup; the last one along an axis may be smaller.
void run_threadgroup(u32 x, u32 y, u32 z) {
  Launch *launch = group.launch;
  u32 tg[3] = {x, y, z}, size[3], count[3];
  for (int i = 0; i < 3; ++i) {
    u32 rest = launch->grid[i] - tg[i] * launch->threadgroup[i];
    size[i] = rest < launch->threadgroup[i] ? rest : launch->threadgroup[i];
    count[i] = (launch->grid[i] + launch->threadgroup[i] - 1) / launch->threadgroup[i];
  }
  u32 index = (u32)(((u64)z * count[1] + y) * count[0] + x - group.first);
  group.generation++;
  group.n_threads = group.n_alive = size[0] * size[1] * size[2];
  group.n_simdgroups = (group.n_threads + SIMD_WIDTH - 1) / SIMD_WIDTH;
  group.n_at_barrier = 0;
  group.warned_site = 0;
  group.steps = 0;
  reset_threadgroup_memory();
  for (u32 i = 0; i < group.n_simdgroups; ++i) {
    SimdGroup &s = group.simdgroups[i];
    s.first = i * SIMD_WIDTH;
    s.size = group.n_threads - s.first < SIMD_WIDTH ? group.n_threads - s.first : SIMD_WIDTH;
    s.alive = full_mask(s);
    s.at_simd = s.at_barrier = s.at_simd_barrier = 0;
  }
  for (u32 i = 0; i < group.n_threads; ++i) {
    Lane *lane = group.lanes + i;
    lane->state = RUNNING;
    lane->thread = i;
    lane->lane = i % SIMD_WIDTH;
    lane->simdgroup = i / SIMD_WIDTH;
    lane->id = index * MAX_THREADS + i;
    lane->device_clock = lane->threadgroup_clock = {1, 0};
    set_context(lane, tg, size, count);
    prepare_stack(lane);
  }
  SimdGroup &start = group.simdgroups[simdgroups_descend() ? group.n_simdgroups - 1 : 0];
  group.current = lane_of(start, lanes_descend() ? start.size - 1 : 0);
  mtl_switch(&group.main_stack_pointer, group.current->stack_pointer);
  group.current = nullptr;
}
