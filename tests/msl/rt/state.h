// The running threadgroup: one fiber per thread, all on one operating-system thread.
#pragma once
#include "abi.h"

const u32 MAX_THREADS = 1024, SIMD_WIDTH = 32, MAX_VARIABLES = 256, MAX_STEPS = 32u << 20;
const u64 ARENA_BYTES = 1 << 18, STACK_BYTES = 256 << 10;

// A source position packed as line << 10 | column.
#define POSITION(site) (site) >> 10, (site) & 1023

enum State { RUNNING, AT_SIMD, AT_BARRIER, AT_SIMD_BARRIER, DONE };
enum MemoryFlag { MEM_DEVICE = 1, MEM_THREADGROUP = 2 };

// How many barriers ordered this thread's accesses to one kind of memory so far.
struct Clock {
  u32 group, simd;  // threadgroup barriers; SIMD-group barriers since the last of them
};

struct Lane {
  void *stack_pointer;
  State state;
  u32 lane, simdgroup, thread, id;  // id: unique in the launch
  u32 site;                         // where it waits
  void *caller;
  int op, uniform;  // which SIMD function, and its argument that must agree between lanes
  u32 flags;        // of the barrier it waits at
  Clock device_clock, threadgroup_clock;
  Exchange *exchange;
  u32 value_size;
  alignas(32) u8 value[32];
  Context context;
};

struct SimdGroup {
  u32 first, size, alive, at_simd, at_barrier, at_simd_barrier;  // masks of lanes
  Exchange exchange;
};

struct Variable {
  bool used;
  u64 offset, size;
  const char *name;
};

// State of one byte of threadgroup memory; the upper half is log2 of the size of the variable's scalars.
enum ArenaByte : u8 { OUTSIDE = 0, INSIDE = 1, INITIALISED = 2, ELEMENT_SHIFT = 4 };

// Who read or wrote one cell of memory last, to find accesses that no barrier orders.
enum Readers : u32 { NOBODY, ONE_THREAD, ONE_SIMDGROUP, ONE_THREADGROUP, MANY };
struct Cell {
  u32 generation;  // threadgroup memory: which threadgroup the rest is about
  u32 writer;      // Lane::id + 1
  Clock written;
  u32 reader;  // Lane::id
  Readers readers;
  Clock read;
};

// A store that was announced and happens right after; its value can be looked at before anything else runs.
struct PendingStore {
  const u8 *address;  // null: none
  const Site *site;
  const Buffer *buffer;
  Lane *lane;
};

struct Group {
  Launch *launch;
  void *main_stack_pointer;
  Lane *current;
  Lane *lanes;
  SimdGroup simdgroups[MAX_THREADS / SIMD_WIDTH];
  u32 n_threads, n_simdgroups, n_alive, n_at_barrier, generation;
  u64 first;  // threadgroup of the grid that runs
  u8 *stacks;
  // threadgroup memory
  u8 *arena, *arena_state;  // state: one ArenaByte set per byte
  Cell *arena_cells;
  u64 arena_top, arena_used;
  Variable variables[MAX_VARIABLES];
  // device memory
  Cell **buffer_cells;
  u32 last_buffer;
  PendingStore pending;
  u32 warned_site;
  u32 steps;  // memory accesses since the last switch
};

extern Group group;

[[noreturn]] void fail(const char *format, ...) __attribute__((format(printf, 1, 2)));
[[noreturn]] void fail_in(Lane *lane, const char *format, ...) __attribute__((format(printf, 2, 3)));
void warn(const char *format, ...) __attribute__((format(printf, 1, 2)));
void schedule();
void run_threadgroup(u32 x, u32 y, u32 z);
void reset_threadgroup_memory();
void check_pending_store();
extern "C" void mtl_switch(void **from, void *to);

// Undefined behaviour that many GPUs tolerate: an error, or a warning with strict=False.
#define ISSUE(lane, ...)          \
  do {                            \
    if (group.launch->strict)     \
      fail_in(lane, __VA_ARGS__); \
    else                          \
      warn(__VA_ARGS__);          \
  } while (0)
