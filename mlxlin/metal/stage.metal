// One to sixteen tokens of a whole mixer in one dispatch, from its projections to its normed and gated output. The body
// of a kernel calls these functions one after the other:
//
//   1  all threads: convolution, features, norm, rotation and gates of all tokens, into threadgroup memory
//   2  L lanes per row of the state, K / L channels each in registers: the recurrence over all tokens
//   3  one SIMD-group per token: norm over the head and output gate
//
// 1 is here, 2 and 3 are in decode.metal.
// A threadgroup runs one value head, or one of several parts of its rows (then the norm is a dispatch of its own).
// The record of one token in threadgroup memory, SIZE floats:
// q | k of each sub-token | v of each sub-token | decays | a | b | betas | time step | bonus | slots: fits | lost

// What a threadgroup works on, and which of its SIMD-groups and lanes this thread is
struct Place {
  int batch, hv, h, v0;  // value head, query head
  int kh, vh;            // the projected heads of its keys, of its values and decays
  int n;                // real tokens
  bool first_of_head;   // of the parts of a value head
  bool first_of_query;  // of all threadgroups that read one query head: it writes what belongs to the query head
  bool first_of_key;    // and so for the projected heads of keys and of values, of these each part for its own rows
  bool first_of_value;
  int group, groups, lane;
};
inline int thread_of(Place p) { return p.group * 32 + p.lane; }
template <typename P>
inline Place place_of(uint3 threadgroup_, int VT, int H, int HV, int repeats, View<P> lengths, int T, uint group,
                      int groups, uint lane) {
  Place p;
  p.batch = threadgroup_.z;
  p.hv = threadgroup_.y;
  p.h = p.hv / (HV / H);
  p.kh = p.h / repeats;
  p.vh = p.hv / repeats;
  p.v0 = threadgroup_.x * VT;
  p.n = real_tokens(lengths, p.batch, T);
  p.first_of_head = threadgroup_.x == 0;
  p.first_of_query = p.first_of_head && p.hv % (HV / H) == 0;
  p.first_of_key = p.first_of_head && p.hv % (HV / H * repeats) == 0;
  p.first_of_value = p.hv % repeats == 0;
  p.group = group;
  p.groups = groups;
  p.lane = lane;
  return p;
}

// 1: a vector of K features of the channels from c0 on; one SIMD-group per token
template <int K, int SIZE, int ACTIVATION, int NORM, int MAP = IDENTITY, typename CHANNELS>
inline void stage_vectors(threadgroup float* record, CHANNELS x, int c0, float scale, Place p, float eps = 1e-6f) {
  for (int t = p.group; t < p.n; t += p.groups) {
    const Lanes<K> v = vector_of<K, ACTIVATION, NORM, MAP>(x, p.batch, t, c0, scale, p.lane, eps);
#pragma unroll
    for (int i = 0; i < K / 32; ++i) record[t * SIZE + p.lane + 32 * i] = v.x[i];
  }
}

// 1: staged vectors times a learned factor per channel; the same lanes have staged them
template <int K, int SIZE, typename P> inline void stage_gains(threadgroup float* record, View<P> gains, Place p) {
  for (int t = p.group; t < p.n; t += p.groups) {
#pragma unroll
    for (int i = p.lane; i < K; i += 32) record[t * SIZE + i] *= gain(row(gains, 0, 0, 0), i);
  }
}

// 1: what reads the state of a delta rule with a reader, a fraction p of k, and q corrected by p; q, k and p of unit
// length. The same lanes have staged q and k. `reader` [1, 2, H, 1] holds the fractions and the corrections.
template <int K, int SIZE, int KEYS, int A, typename P>
inline void stage_reader(threadgroup float* record, View<P> reader, float scale, Place p) {
  const float fraction = load(row(reader, 0, 0, p.h), 0), correction = load(row(reader, 0, 1, p.h), 0) * fraction;
  for (int t = p.group; t < p.n; t += p.groups) {
    threadgroup float* x = record + t * SIZE + p.lane;
    float q_squares = 0.0f, k_squares = 0.0f;
#pragma unroll
    for (int i = 0; i < K; i += 32) {
      const float k = x[KEYS + i], q = x[i] - correction * k;
      x[i] = q;
      q_squares += q * q;
      k_squares += k * k;
    }
    k_squares = simd_sum(k_squares);
    const float q_scale = scale * rsqrt(simd_sum(q_squares) + 1e-6f), k_scale = rsqrt(k_squares + 1e-6f);
    const float p_scale = fraction * rsqrt(fraction * fraction * k_squares + 1e-6f);
#pragma unroll
    for (int i = 0; i < K; i += 32) {
      x[i] *= q_scale;
      x[A + i] = x[KEYS + i] * p_scale;
      x[KEYS + i] *= k_scale;
    }
  }
}

// 1: how much of the token's own v is read where the state is read before the write: q . (u k), u the bonus
// [1, 1, H, K]. The same lanes have staged q and k.
template <int K, int SIZE, int KEYS, int BONUS, typename P>
inline void stage_bonuses(threadgroup float* record, View<P> bonus, Place p) {
  const Row<P> u = row(bonus, 0, 0, p.h);
  for (int t = p.group; t < p.n; t += p.groups) {
    threadgroup float* x = record + t * SIZE;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < K; i += 32) sum += x[p.lane + i] * x[KEYS + p.lane + i] * load(u, p.lane + i);
    sum = simd_sum(sum);
    if (p.lane == 0) x[BONUS] = sum;
  }
}

template <int VT, int SIZE, int ACTIVATION, typename CHANNELS>
inline void stage_values(threadgroup float* record, CHANNELS x, int c0, Place p) {
  for (int e = thread_of(p); e < p.n * VT; e += p.groups * 32)
    record[e / VT * SIZE + e % VT] = channel<ACTIVATION>(x, p.batch, e / VT, c0 + p.v0 + e % VT);
}

// 1: the first DIMS channels of staged vectors turned by the angles of their token; pairs are neighbours or two halves
template <int DIMS, bool INTERLEAVED, int SIZE, typename CP, typename SP>
inline void turn(threadgroup float* record, View<CP> cos_, View<SP> sin_, Place p) {
  constexpr int PAIRS = DIMS / 2;
  for (int e = thread_of(p); e < p.n * PAIRS; e += p.groups * 32)
    turn_pair<DIMS, INTERLEAVED>(record + e / PAIRS * SIZE, e % PAIRS, cos_, sin_, p.batch, e / PAIRS);
}

// 1: the decays of D channels (1: of the head), and their logarithms to the tape
template <int D, int SIZE, typename GATES, typename OUT>
inline void stage_decays(threadgroup float* record, GATES g, int head, OUT tape, int T, int HV, Place p) {
  for (int e = thread_of(p); e < T * D; e += p.groups * 32) {
    const int t = e / D, d = e % D;
    const float x = t < p.n ? log_decay(g, p.batch, t, head, d) : 0.0f;
    if (t < p.n) record[t * SIZE + d] = decay_of(x);
    if (p.first_of_head) put(tape, ((int64_t(p.batch) * T + t) * HV + p.hv) * D + d, x);
  }
}

// 1: what a step multiplies v with
template <int SIZE, typename GATES> inline void stage_steps(threadgroup float* record, GATES g, Place p) {
  for (int t = thread_of(p); t < p.n; t += p.groups * 32) record[t * SIZE] = time_step(g, p.batch, t, p.vh, 0);
}

// 1: keys that are what the decay lets go of
template <int K, int SIZE, typename GATES> inline void stage_forgotten(threadgroup float* record, GATES g, Place p) {
  for (int e = thread_of(p); e < p.n * K; e += p.groups * 32)
    record[e / K * SIZE + e % K] = forgotten(g, p.batch, e / K, p.vh, e % K);
}

// 1: beta of sub-token j, channel `c` of its projection
template <int SIZE, int ACTIVATION, typename P>
inline void stage_betas(threadgroup float* record, View<P> beta, int c, float factor, Place p) {
  for (int t = thread_of(p); t < p.n; t += p.groups * 32)
    record[t * SIZE] = factor * activated<ACTIVATION>(load(row(beta, p.batch, t, 0), c));
}
