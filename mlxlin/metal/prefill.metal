// A mixer's projections made ready for its recurrence: convolution, activation, unit norm and gates of many tokens.
// One SIMD-group per token and vector: H queries, then N H keys, then N HV values, which bring the gates of their head.
// Past the last real token everything is zero.
template <int K, int ACTIVATION, bool NORMED, typename CHANNELS, typename OUT>
inline void prefill_vector(CHANNELS x, int c0, float scale, device OUT* out, int64_t at, int b, int t, bool real,
                           int lane) {
  Lanes<K> v;
#pragma unroll
  for (int i = 0; i < K / 32; ++i) v.x[i] = 0.0f;
  if (real) v = vector_of<K, ACTIVATION, NORMED>(x, b, t, c0, scale, lane);
#pragma unroll
  for (int i = 0; i < K / 32; ++i) out[at * K + lane + 32 * i] = OUT(v.x[i]);
}

// The log decays of D channels (1: of the head) of one token, zero past the last real one
template <int D, typename GATES>
inline void prefill_decay(GATES g, device float* out, int64_t at, int b, int t, int hv, bool real, int lane) {
  for (int d = lane; d < D; d += 32) out[at * D + d] = real ? log_decay(g, b, t, hv, d) : 0.0f;
}
