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

// Channel c of an output, with what bypasses the recurrence (`skip` [B, T, HV, V], v), gated where GATE_FIRST (Mamba-2)
template <int ACTIVATION, bool GATE_FIRST, int V, typename XP, typename DP, typename VP, typename GP>
inline float before_norm(Row<XP> x, View<DP> skip, Row<VP> v, Row<GP> gate, int b, int t, int c) {
  const float y = with_skip(row(skip, b, t, c / V), load(x, c), load(v, c), c % V);
  return GATE_FIRST ? y * factor<ACTIVATION>(gate, c) : y;
}

// The norm of each group of D channels times `weight`, where CENTERED plus `bias`; then gated if that was not first.
// Zeros past the last real token.
template <bool NORMED, bool CENTERED, int ACTIVATION, bool GATE_FIRST, int V, typename XP, typename DP, typename VP,
          typename GP, typename WP, typename BP, typename LENGTHS, typename Y>
inline void gated_norm(View<XP> x_, View<DP> skip, View<VP> v_, View<GP> gate_, View<WP> weight, View<BP> bias_,
                       View<LENGTHS> lengths, int T, int groups_of_row, int D, float eps, device Y* y,
                       threadgroup float* scratch, uint row_, uint thread_, uint threads, uint group, uint lane) {
  const int part = row_ % groups_of_row, token = row_ / groups_of_row, c0 = part * D, b = token / T, t = token % T;
  const bool real = t < real_tokens(lengths, b, T);
  const Row<XP> x = row(x_, b, t, 0);
  const Row<VP> v = row(v_, b, t, 0);
  const Row<GP> gate = row(gate_, b, t, 0);
  const Row<WP> w = row(weight, 0, 0, part);
  const Row<BP> bias = row(bias_, 0, 0, part);
  float mean = 0.0f, norm = 1.0f;
  if (CENTERED) {
    for (int d = thread_; d < D; d += threads)
      mean += before_norm<ACTIVATION, GATE_FIRST, V>(x, skip, v, gate, b, t, c0 + d);
    mean = threadgroup_sum(mean, scratch, group, threads / 32, lane) / D;
    threadgroup_barrier(mem_flags::mem_threadgroup);  // scratch is used again
  }
  if (NORMED) {
    float squares = 0.0f;
    for (int d = thread_; d < D; d += threads) {
      const float z = before_norm<ACTIVATION, GATE_FIRST, V>(x, skip, v, gate, b, t, c0 + d) - mean;
      squares += z * z;
    }
    norm = rsqrt(threadgroup_sum(squares, scratch, group, threads / 32, lane) / D + eps);
  }
  for (int d = thread_; d < D; d += threads) {
    const float z = before_norm<ACTIVATION, GATE_FIRST, V>(x, skip, v, gate, b, t, c0 + d) - mean;
    float out = z * norm * gain(w, d);
    if (CENTERED) out += load(bias, d);
    if (!GATE_FIRST) out *= factor<ACTIVATION>(gate, c0 + d);
    y[int64_t(row_) * D + d] = Y(real ? out : 0.0f);
  }
}
