// A mixer's projections made ready for its recurrence: convolution, features, norms, rotation and gates of many tokens.
// One SIMD-group per token and vector: queries, then the keys of each sub-token, then the values of each, which bring
// the gates of their head. Past the last real token everything is zero.
template <int K> inline Lanes<K> zero_vector() {
  Lanes<K> v;
#pragma unroll
  for (int i = 0; i < (K + 31) / 32; ++i) v.x[i] = 0.0f;
  return v;
}

template <int K, typename OUT> inline void store(Lanes<K> v, device OUT* out, int64_t at, int lane) {
#pragma unroll
  for (int i = 0; i < (K + 31) / 32; ++i)
    if (K % 32 == 0 || lane + 32 * i < K) out[at * K + lane + 32 * i] = OUT(v.x[i]);
}

// The vector turned by the angles of token t; `scratch` holds K numbers of this SIMD-group.
template <int DIMS, bool INTERLEAVED, int K, typename CP, typename SP>
inline Lanes<K> turned(Lanes<K> v, View<CP> cos_, View<SP> sin_, threadgroup float* scratch, int b, int t, int lane) {
#pragma unroll
  for (int i = 0; i < K / 32; ++i) scratch[lane + 32 * i] = v.x[i];
  simdgroup_barrier(mem_flags::mem_threadgroup);
  for (int i = lane; i < DIMS / 2; i += 32) turn_pair<DIMS, INTERLEAVED>(scratch, i, cos_, sin_, b, t);
  simdgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
  for (int i = 0; i < K / 32; ++i) v.x[i] = scratch[lane + 32 * i];
  return v;
}

template <int K, typename P> inline Lanes<K> with_gains(Lanes<K> v, View<P> gains, int lane) {
#pragma unroll
  for (int i = 0; i < K / 32; ++i) v.x[i] *= gain(row(gains, 0, 0, 0), lane + 32 * i);
  return v;
}

template <int K> inline Lanes<K> of_unit_length(Lanes<K> v, float scale) {
  return times(v, scale * norm_factor<L2>(v, 1e-6f));
}

// A query without `part` of the key
template <int K> inline Lanes<K> without(Lanes<K> q, Lanes<K> k, float part) {
#pragma unroll
  for (int i = 0; i < K / 32; ++i) q.x[i] -= part * k.x[i];
  return q;
}

// q . (u k), u the bonus [1, 1, H, K]
template <int K, typename P> inline float product_of(Lanes<K> q, Lanes<K> k, View<P> bonus, int h, int lane) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < K / 32; ++i) sum += q.x[i] * k.x[i] * load(row(bonus, 0, 0, h), lane + 32 * i);
  return simd_sum(sum);
}

// A key that is what the decay lets go of
template <int K, typename GATES> inline Lanes<K> forgotten_key(GATES g, int b, int t, int h, int lane) {
  Lanes<K> k;
#pragma unroll
  for (int i = 0; i < K / 32; ++i) k.x[i] = forgotten(g, b, t, h, lane + 32 * i);
  return k;
}

// What the decays let go of, 1 - exp(g)
template <int D, typename GATES>
inline void store_lost(GATES g, device float* out, int64_t at, int b, int t, int h, bool real, int lane) {
  for (int d = lane; d < D; d += 32) out[at * D + d] = real ? lost(decay_of(log_decay(g, b, t, h, d))) : 0.0f;
}

// The log decays of D channels (1: of the head)
template <int D, typename GATES>
inline void store_decays(GATES g, device float* out, int64_t at, int b, int t, int h, bool real, int lane) {
  for (int d = lane; d < D; d += 32) out[at * D + d] = real ? log_decay(g, b, t, h, d) : 0.0f;
}
