// Norms over rows of D elements, one threadgroup per row, with what stands beside them.

// The sum over a threadgroup of up to 32 SIMD-groups, on every thread
inline float threadgroup_sum(float x, threadgroup float* scratch, uint group, uint groups, uint lane) {
  x = simd_sum(x);
  if (lane == 0) scratch[group] = x;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return simd_sum(lane < groups ? scratch[lane] : 0.0f);
}

// sum = x + residual, normed = norm(sum) weight + bias; the norm sees the sum as it is stored. The norm divides by the
// root mean square, of what is left without the mean where CENTERED.
template <bool CENTERED, typename XP, typename RP, typename WP, typename BP, typename Y>
inline void add_norm(View<XP> x_, View<RP> residual_, View<WP> weight, View<BP> bias, int T, int D, float eps,
                     device Y* sum, device Y* normed, threadgroup float* scratch, uint row_, uint thread_, uint threads,
                     uint group, uint lane) {
  const Row<XP> x = row(x_, row_ / T, row_ % T, 0);
  const Row<RP> residual = row(residual_, row_ / T, row_ % T, 0);
  const Row<WP> w = row(weight, 0, 0, 0);
  const Row<BP> b = row(bias, 0, 0, 0);
  const int64_t at = int64_t(row_) * D;
  float total = 0.0f, squares = 0.0f;
  for (int d = thread_; d < D; d += threads) {
    const Y s = Y(load(x, d) + load(residual, d));
    sum[at + d] = s;
    total += float(s);
    squares += float(s) * float(s);
  }
  float mean = 0.0f;
  if (CENTERED) {
    mean = threadgroup_sum(total, scratch, group, threads / 32, lane) / D;
    squares = 0.0f;
    for (int d = thread_; d < D; d += threads) {
      const float s = float(Y(load(x, d) + load(residual, d))) - mean;
      squares += s * s;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);  // scratch is used again
  }
  const float norm = rsqrt(threadgroup_sum(squares, scratch, group, threads / 32, lane) / D + eps);
  for (int d = thread_; d < D; d += threads) {
    const float s = float(Y(load(x, d) + load(residual, d))) - mean;
    normed[at + d] = Y(s * norm * load(w, d) + load(b, d));
  }
}

template <int ACTIVATION, typename P> inline float factor(Row<P> gate, int i) {
  return activated<ACTIVATION>(load(gate, i));
}
template <int ACTIVATION> inline float factor(Row<Absent>, int) { return 1.0f; }

// The norm of each group of D channels times `weight`, where CENTERED plus `bias`, gated after the norm, or before it where GATE_FIRST
// (Mamba-2).
template <bool CENTERED, int ACTIVATION, bool GATE_FIRST, typename XP, typename GP, typename WP, typename BP, typename Y>
inline void gated_norm(View<XP> x_, View<GP> gate_, View<WP> weight, View<BP> bias_, int T, int groups_of_row, int D,
                       float eps, device Y* y, threadgroup float* scratch, uint row_, uint thread_, uint threads,
                       uint group, uint lane) {
  const int part = row_ % groups_of_row, token = row_ / groups_of_row, c0 = part * D;
  const Row<XP> x = row(x_, token / T, token % T, 0);
  const Row<GP> gate = row(gate_, token / T, token % T, 0);
  const Row<WP> w = row(weight, 0, 0, part);
  const Row<BP> bias = row(bias_, 0, 0, part);
  float mean = 0.0f, squares = 0.0f;
  if (CENTERED) {
    for (int d = thread_; d < D; d += threads)
      mean += load(x, c0 + d) * (GATE_FIRST ? factor<ACTIVATION>(gate, c0 + d) : 1.0f);
    mean = threadgroup_sum(mean, scratch, group, threads / 32, lane) / D;
    threadgroup_barrier(mem_flags::mem_threadgroup);  // scratch is used again
  }
  for (int d = thread_; d < D; d += threads) {
    const float z = load(x, c0 + d) * (GATE_FIRST ? factor<ACTIVATION>(gate, c0 + d) : 1.0f) - mean;
    squares += z * z;
  }
  const float norm = rsqrt(threadgroup_sum(squares, scratch, group, threads / 32, lane) / D + eps);
  for (int d = thread_; d < D; d += threads) {
    const float z = load(x, c0 + d) * (GATE_FIRST ? factor<ACTIVATION>(gate, c0 + d) : 1.0f) - mean;
    float normed = z * norm * gain(w, d);
    if (CENTERED) normed += load(bias, d);
    y[int64_t(row_) * D + d] = Y(GATE_FIRST ? normed : normed * factor<ACTIVATION>(gate, c0 + d));
  }
}
