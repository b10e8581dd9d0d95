// Runs a grid of threadgroups one after the other and turns memory faults into messages.
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "state.h"

static const u64 PAGE = 4096;
static sigjmp_buf fault_exit;

static void describe_fault(int signal, const u8 *address) {
  Launch *launch = group.launch;
  launch->failed = 1;
  if (address >= group.stacks && address < group.stacks + STACK_BYTES * MAX_THREADS) {
    snprintf(launch->message, sizeof launch->message, "thread-private arrays exceed the emulator's stack (%lu KiB)",
             (unsigned long)(STACK_BYTES >> 10));
    return;
  }
  const Buffer *nearest = nullptr;
  u64 best = ~0ull;
  for (u32 i = 0; i < launch->n_buffers; ++i) {
    const Buffer &b = launch->buffers[i];
    u64 distance = address < b.base ? (u64)(b.base - address) : (u64)(address - b.base) - b.bytes;
    if (distance < best) best = distance, nearest = &b;
  }
  U3 thread = group.current->context.thread_position_in_grid;
  snprintf(launch->message, sizeof launch->message,
           "%s near element %ld of '%s' by thread (%u,%u,%u) of the grid; check=True shows the source line",
           signal == SIGFPE ? "integer division by zero" : "memory fault",
           nearest ? (long)(address - nearest->base) / (long)nearest->item_size : 0, nearest ? nearest->name : "?",
           thread.x, thread.y, thread.z);
}

static void on_fault(int number, siginfo_t *info, void *) {
  if (!group.current) {  // not ours
    signal(number, SIG_DFL);
    return;
  }
  describe_fault(number, (const u8 *)info->si_addr);
  siglongjmp(fault_exit, 1);
}

static u8 *map(u64 bytes) {
  void *memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) abort();
  return (u8 *)memory;
}

// Fibers and threadgroup memory live for the whole process.
static void allocate_once() {
  if (group.lanes) return;
  group.lanes = (Lane *)map(sizeof(Lane) * MAX_THREADS);
  group.arena = map(ARENA_BYTES);
  group.arena_state = map(ARENA_BYTES);
  group.arena_cells = (Cell *)map(ARENA_BYTES * sizeof(Cell));
  group.stacks = map(STACK_BYTES * MAX_THREADS);
  for (u32 i = 0; i < MAX_THREADS; ++i) mprotect(group.stacks + i * STACK_BYTES, PAGE, PROT_NONE);
}

static u64 cell_bytes(const Buffer &b) { return (b.bytes / b.item_size + 1) * sizeof(Cell); }

static void run_grid(Launch *launch) {
  u64 count[3], total = 1;
  for (int i = 0; i < 3; ++i) {
    count[i] = (launch->grid[i] + launch->threadgroup[i] - 1) / launch->threadgroup[i];
    total *= count[i];
  }
  u64 n = launch->last < total ? launch->last : total;
  group.first = total - n;
  for (u64 i = 0; i < n && !launch->failed; ++i) {
    u64 k = launch->order & 4 ? total - 1 - i : group.first + i;
    run_threadgroup((u32)(k % count[0]), (u32)(k / count[0] % count[1]), (u32)(k / (count[0] * count[1])));
  }
}

extern "C" {

void mtl_launch(Launch *launch) {
  allocate_once();
  group.launch = launch;
  group.last_buffer = 0;
  group.pending.address = nullptr;
  group.arena_top = ARENA_BYTES;
  Cell **cells = (Cell **)calloc(launch->n_buffers + 1, sizeof(Cell *));
  for (u32 i = 0; i < launch->n_buffers; ++i) {
    const Buffer &b = launch->buffers[i];
    if (launch->check && b.is_output) cells[i] = (Cell *)map(cell_bytes(b));
  }
  group.buffer_cells = cells;

  stack_t alternate = {malloc(65536), 0, 65536}, old_stack;
  sigaltstack(&alternate, &old_stack);
  struct sigaction action, old[3];
  memset(&action, 0, sizeof action);
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  const int signals[3] = {SIGSEGV, SIGBUS, SIGFPE};
  for (int i = 0; i < 3; ++i) sigaction(signals[i], &action, &old[i]);

  if (sigsetjmp(fault_exit, 1) == 0) run_grid(launch);

  group.current = nullptr;
  for (int i = 0; i < 3; ++i) sigaction(signals[i], &old[i], nullptr);
  sigaltstack(&old_stack, nullptr);
  free(alternate.ss_sp);
  for (u32 i = 0; i < launch->n_buffers; ++i)
    if (cells[i]) munmap(cells[i], cell_bytes(launch->buffers[i]));
  free(cells);
}

// Memory between two inaccessible pages; it ends as close to the second one as `align` allows.
u8 *mtl_guarded_alloc(u64 bytes, u64 align, u64 *mapped_bytes, u8 **mapped) {
  u64 body = (bytes + align + PAGE - 1) / PAGE * PAGE;
  u8 *memory = map(body + 2 * PAGE);
  mprotect(memory, PAGE, PROT_NONE);
  mprotect(memory + PAGE + body, PAGE, PROT_NONE);
  *mapped = memory;
  *mapped_bytes = body + 2 * PAGE;
  u64 end = (u64)(memory + PAGE + body);
  return (u8 *)((end - bytes) / align * align);
}

void mtl_guarded_free(u8 *mapped, u64 mapped_bytes) { munmap(mapped, mapped_bytes); }
}
