// Error and warning texts.
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "state.h"

static void append(char *text, size_t capacity, const char *format, va_list arguments) {
  size_t used = strlen(text);
  if (used + 1 < capacity) vsnprintf(text + used, capacity - used, format, arguments);
}

static void append(char *text, size_t capacity, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  append(text, capacity, format, arguments);
  va_end(arguments);
}

[[noreturn]] static void stop(Lane *lane, const char *format, va_list arguments) {
  Launch *launch = group.launch;
  append(launch->message, sizeof launch->message, format, arguments);
  U3 thread = lane->context.thread_position_in_threadgroup, tg = lane->context.threadgroup_position_in_grid;
  append(launch->message, sizeof launch->message,
         " [thread (%u,%u,%u) of threadgroup (%u,%u,%u), simdgroup %u lane %u]", thread.x, thread.y, thread.z, tg.x,
         tg.y, tg.z, lane->simdgroup, lane->lane);
  launch->failed = 1;
  void *abandoned;
  mtl_switch(&abandoned, group.main_stack_pointer);
  abort();
}

void fail(const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  stop(group.current, format, arguments);
}

void fail_in(Lane *lane, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  stop(lane, format, arguments);
}

void warn(const char *format, ...) {
  Launch *launch = group.launch;
  if (++launch->n_warnings > 16) return;
  va_list arguments;
  va_start(arguments, format);
  append(launch->warnings, sizeof launch->warnings, format, arguments);
  va_end(arguments);
  append(launch->warnings, sizeof launch->warnings, "\n");
}

// Undefined-behaviour sanitizer handlers; clang passes a struct that starts with {file, line, column}.
struct SanitizerSite {
  const char *file;
  u32 line, column;
};
#define HANDLER(name, text)                                                                                \
  extern "C" __attribute__((visibility("default"))) void __ubsan_handle_##name(SanitizerSite *site, ...) { \
    fail("line %u:%u: %s", site->line, site->column, text);                                                \
  }
HANDLER(out_of_bounds, "index out of bounds of an array")
HANDLER(shift_out_of_bounds, "shift amount out of range")
HANDLER(add_overflow, "signed integer overflow in addition")
HANDLER(sub_overflow, "signed integer overflow in subtraction")
HANDLER(mul_overflow, "signed integer overflow in multiplication")
HANDLER(negate_overflow, "signed integer overflow in negation")
HANDLER(divrem_overflow, "integer division by zero or overflow")
HANDLER(builtin_unreachable, "end of a non-void function reached")
HANDLER(missing_return, "end of a non-void function reached")

extern "C" __attribute__((visibility("default"))) void __ubsan_handle_float_cast_overflow(SanitizerSite *site, ...) {
  fail("line %u:%u: float value out of range of the integer type it is converted to", site->line, site->column);
}
