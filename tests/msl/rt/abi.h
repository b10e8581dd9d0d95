// Structures shared with launch.py (ctypes), with the shim headers and with instrumented kernels.
#pragma once
#include <stdint.h>

typedef uint8_t u8;
typedef uint32_t u32;
typedef uint64_t u64;

extern "C" {

// What the lanes of a SIMD-group see of each other in one SIMD function (same layout as in shim/mtl/runtime.h).
struct Exchange {
  u32 mask;   // lanes that take part
  u32 ready;  // set by the first lane that resumes, once `result` holds what all lanes share
  alignas(32) u8 result[256];
  alignas(32) u8 slot[32][32];
};

struct U3 {
  u32 x, y, z, pad;
};

// Kernel attributes, read by the generated entry point (order: compile.py).
struct alignas(16) Context {
  u32 dispatch_quadgroups_per_threadgroup, dispatch_simdgroups_per_threadgroup, quadgroup_index_in_threadgroup,
      quadgroups_per_threadgroup, simdgroup_index_in_threadgroup, simdgroups_per_threadgroup, thread_execution_width,
      thread_index_in_quadgroup, thread_index_in_simdgroup, thread_index_in_threadgroup, threads_per_simdgroup, pad;
  U3 dispatch_threads_per_threadgroup, grid_origin, grid_size, thread_position_in_grid, thread_position_in_threadgroup,
      threadgroup_position_in_grid, threadgroups_per_grid, threads_per_grid, threads_per_threadgroup;
};

typedef void (*Entry)(void **arguments, const Context *context);

// One place in the source that accesses GPU memory.
struct Site {
  u32 size, align, space, is_store;
  u32 float_bytes;  // size of one element if they are floats, else 0
  u32 line, column;
};

// State of one byte of a buffer.
enum Byte : u8 { VALID = 1, READ = 2, WRITTEN = 4 };

struct Buffer {
  u8 *base;
  u64 bytes;
  u32 item_size, is_output, is_whole;  // whole: every byte is valid, whatever its state
  const char *name;
  u8 *state;  // one Byte set per byte
  u64 loaded, stored, unique_loaded, unique_stored;
};

struct Launch {
  Entry entry;
  void **arguments;
  u32 grid[3], threadgroup[3];
  u64 last;  // threadgroups to run, at the end of the grid
  u32 check, strict, order, threadgroup_limit, n_buffers;
  Buffer *buffers;
  Site *sites;
  u64 *site_counts;
  u32 failed, threadgroup_bytes;
  u64 simd_ops, barriers, simdgroup_barriers, matrix_products, flops, specials, atomics, n_warnings;
  char message[2048], warnings[4096];
};
}

enum Space : u32 { DEVICE = 1, CONSTANT = 2, THREADGROUP = 3 };
