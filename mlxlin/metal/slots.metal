// Gated slot attention (arXiv:2409.07146): what stands between the recurrence over the keys of the slots and that over
// their values, both of decode.metal. Every part of a value head needs all keys.
inline Place whole(Place p) {
  p.v0 = 0;
  return p;
}

// An output that several threadgroups know and one of them writes
struct WrittenOnce {
  device float* data;
  bool here;
};
inline WrittenOnce written_once(device float* data, bool here) {
  WrittenOnce out;
  out.data = data;
  out.here = here;
  return out;
}
inline void put(WrittenOnce out, int64_t i, float x) {
  if (out.here) out.data[i] = x;
}

// 1: what each of N slots lets go of, 1 - exp(g), in two places; the same threads have staged the decays
template <int N, int SIZE>
inline void stage_lost(const threadgroup float* decays, threadgroup float* one, threadgroup float* two, Place p) {
  for (int e = thread_of(p); e < p.n * N; e += p.groups * 32) {
    const int i = e / N * SIZE + e % N;
    one[i] = two[i] = lost(decays[i]);
  }
}

// 2: a softmax of N numbers in their place; one SIMD-group per token
template <int N, int SIZE> inline void stage_softmax(threadgroup float* record, Place p) {
  for (int t = p.group; t < p.n; t += p.groups) {
    Lanes<N> v;
#pragma unroll
    for (int i = 0; i < N / 32; ++i) v.x[i] = record[t * SIZE + p.lane + 32 * i];
    to_softmax(v);
#pragma unroll
    for (int i = 0; i < N / 32; ++i) record[t * SIZE + p.lane + 32 * i] = v.x[i];
  }
}
