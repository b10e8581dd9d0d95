// Shared by all kernels: optional inputs, strided reads, lengths, and vectors split over neighbouring lanes.
// K, V: head sizes. H, HV: key and value heads. Every input is seen as four-dimensional.
#include <metal_simdgroup_matrix>

enum Decay { NO_DECAY, HEAD_DECAY, CHANNEL_DECAY, VALUE_DECAY };
enum Write { ADD, DELTA, READER_DELTA, LOW_RANK };

// An input that was not given: it reads as zero (no decay, an empty state) and swallows writes.
struct Absent {};

// An input as MLX hands it over: any strides, `device` or (below 8 elements) `constant` address space.
template <typename P> struct View {
  P data;
  const constant int64_t* strides;
};
template <> struct View<Absent> {};

template <typename P> inline View<P> view(P data, const constant int64_t* strides) {
  View<P> x;
  x.data = data;
  x.strides = strides;
  return x;
}
inline View<Absent> view(Absent) { return View<Absent>(); }

// A vector along the last axis, and the way to the same vector of the next token.
// Offsets are 64 bits wide: B T H K passes 2^31.
template <typename P> struct Row {
  P data;
  int64_t step;
  int64_t next;
};
template <> struct Row<Absent> {};

template <typename P> inline Row<P> row(View<P> x, int b, int t, int h) {
  Row<P> r;
  r.data = x.data + (b * x.strides[0] + t * x.strides[1] + h * x.strides[2]);
  r.step = x.strides[3];
  r.next = x.strides[1];
  return r;
}
inline Row<Absent> row(View<Absent>, int, int, int) { return Row<Absent>(); }

template <typename P> inline void to_next(thread Row<P>& x) { x.data += x.next; }
inline void to_next(thread Row<Absent>&) {}

template <typename P> inline float load(Row<P> x, int i) { return float(x.data[i * x.step]); }
inline float load(Row<Absent>, int) { return 0.0f; }

// Elements i .. i + 3. All threads take the same branch; behind it the compiler can merge adjacent loads.
template <typename P> inline float4 load4(Row<P> x, int i) {
  if (x.step == 1) {
    P p = x.data + i;
    return float4(float(p[0]), float(p[1]), float(p[2]), float(p[3]));
  }
  P p = x.data + i * x.step;
  return float4(float(p[0]), float(p[x.step]), float(p[2 * x.step]), float(p[3 * x.step]));
}
inline float4 load4(Row<Absent>, int) { return float4(0.0f); }

template <typename P> inline P offset_by(P p, int64_t n) { return p + n; }
inline Absent offset_by(Absent p, int64_t) { return p; }

template <typename OUT> inline void put(device OUT* p, int64_t i, float x) { p[i] = OUT(x); }
inline void put(Absent, int64_t, float) {}

// How many of the T tokens of row b are real. The others leave the state alone and output zero.
template <typename P> inline int real_tokens(View<P> lengths, int b, int T) {
  return clamp(int(lengths.data[b * lengths.strides[0]]), 0, T);
}
inline int real_tokens(View<Absent>, int, int T) { return T; }

// The decay exp(g) of a state as one number: up to one half the factor itself, above it the change exp(g) - 1 <= 0 with
// its sign bit set. Factors just below 1, rounded the same way for every token, would drift: by 1e-4 in 8,192 tokens of
// g = -1e-4.
inline float decay_of(float g) {
  const float w = exp(g);
  if (w <= 0.5f) return w;
  return -abs(w == 1.0f ? g : (w - 1.0f) * (g / log(w)));  // exp(g) - 1 to the last bits (Kahan)
}
inline float lost(float decay) { return as_type<int>(decay) < 0 ? -decay : 1.0f - decay; }  // 1 - exp(g)
inline float decayed(float s, float decay) { return fma(s, decay, as_type<int>(decay) < 0 ? s : 0.0f); }

// One lane's share of a vector of 4 L M channels that L neighbouring lanes hold together: channels 4 (L i + part).
template <int M> struct Part {
  float4 x[M];
};

template <int M, int L, typename P> inline Part<M> part_of(Row<P> x, int part) {
  Part<M> p;
#pragma unroll
  for (int i = 0; i < M; ++i) p.x[i] = load4(x, 4 * (L * i + part));
  return p;
}

template <int L, int M, typename P> inline void put(P out, int64_t at, int part, Part<M> p) {
#pragma unroll
  for (int i = 0; i < M; ++i) {
#pragma unroll
    for (int c = 0; c < 4; ++c) put(out, at + 4 * (L * i + part) + c, p.x[i][c]);
  }
}

template <int M> inline Part<M> filled(float x) {
  Part<M> p;
#pragma unroll
  for (int i = 0; i < M; ++i) p.x[i] = float4(x);
  return p;
}

template <int M> inline Part<M> decays_of(Part<M> g) {
#pragma unroll
  for (int i = 0; i < M; ++i) {
#pragma unroll
    for (int c = 0; c < 4; ++c) g.x[i][c] = decay_of(g.x[i][c]);
  }
  return g;
}

// The dot product of two shared vectors, on every lane that shares them.
template <int L, int M> inline float read(Part<M> s, Part<M> k) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < M; ++i) sum += dot(s.x[i], k.x[i]);
#pragma unroll
  for (int m = 1; m < L; m *= 2) sum += simd_shuffle_xor(sum, ushort(m));
  return sum;
}

template <int M> inline void apply_decay(thread Part<M>& s, Part<M> by) {
#pragma unroll
  for (int i = 0; i < M; ++i) {
#pragma unroll
    for (int c = 0; c < 4; ++c) s.x[i][c] = decayed(s.x[i][c], by.x[i][c]);
  }
}

// s += u k, fused whatever the compiler's mind about contraction, so that a replay gives the same bits
template <int M> inline void write(thread Part<M>& s, float u, Part<M> k) {
#pragma unroll
  for (int i = 0; i < M; ++i) s.x[i] = fma(float4(u), k.x[i], s.x[i]);
}
