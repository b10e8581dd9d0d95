// What stands between a mixer's projections and its recurrence: short convolution, activation, feature map, norm of
// vectors, gates.
enum DecayKind { GIVEN, SOFTPLUS, SIGMOID, LOGSIGMOID, EXPONENTIAL, FORGET };
enum Activation { IDENTITY, SILU, GATE_SIGMOID, RELU, ELU_PLUS_ONE, SILU_TWICE };
enum FeatureMap { DPFP = 8, PRODUCT, HEDGEHOG };  // of whole vectors, beside the activations
enum VectorNorm { AS_IS, L2, SUM, SIMPLEX };

inline float sigmoid(float x) { return 1.0f / (1.0f + exp(-x)); }
inline float softplus(float x) { return max(x, 0.0f) + log1p(exp(-abs(x))); }

template <int ACTIVATION> inline float activated(float x) {
  if (ACTIVATION == SILU) return x * sigmoid(x);
  if (ACTIVATION == GATE_SIGMOID) return sigmoid(x);
  if (ACTIVATION == RELU) return max(x, 0.0f);
  if (ACTIVATION == SILU_TWICE) return activated<SILU>(activated<SILU>(x));
  if (ACTIVATION == ELU_PLUS_ONE) return x > 0.0f ? x + 1.0f : exp(x);
  return x;
}

// Projected channels x [B, T, 1, C] behind a causal depthwise convolution with W taps [1, W, 1, C] (0: none);
// memory [B, W - 1, 1, C] holds the raw inputs before the first token.
template <int W, typename XP, typename MP, typename WP, typename BP> struct Channels {
  View<XP> x;
  View<MP> memory;
  View<WP> weight;
  View<BP> bias;
};
template <int W, typename XP, typename MP, typename WP, typename BP>
inline Channels<W, XP, MP, WP, BP> channels(View<XP> x, View<MP> memory, View<WP> weight, View<BP> bias) {
  Channels<W, XP, MP, WP, BP> s;
  s.x = x;
  s.memory = memory;
  s.weight = weight;
  s.bias = bias;
  return s;
}

// The channels of an array from c on
template <typename P> inline View<P> behind(View<P> x, int c) { return view(x.data + c * x.strides[3], x.strides); }
inline View<Absent> behind(View<Absent>, int) { return View<Absent>(); }

// The raw input of token t, which may lie before the first
template <int W, typename XP, typename MP, typename WP, typename BP>
inline float raw(const thread Channels<W, XP, MP, WP, BP>& s, int b, int t, int c) {
  return t >= 0 ? load(row(s.x, b, t, 0), c) : load(row(s.memory, b, W - 1 + t, 0), c);
}
template <int ACTIVATION, int W, typename XP, typename MP, typename WP, typename BP>
inline float channel(const thread Channels<W, XP, MP, WP, BP>& s, int b, int t, int c) {
  if (W == 0) return activated<ACTIVATION>(load(row(s.x, b, t, 0), c));
  float sum = load(row(s.bias, 0, 0, 0), c);
#pragma unroll
  for (int j = 0; j < W; ++j) sum += load(row(s.weight, 0, j, 0), c) * raw(s, b, t - W + 1 + j, c);
  return activated<ACTIVATION>(sum);
}

// The last W - 1 of n inputs: what the convolution remembers, of channels c, c + stride, .. below `end`.
template <int W, typename XP, typename MP, typename WP, typename BP, typename OUT>
inline void remember(const thread Channels<W, XP, MP, WP, BP>& s, OUT memory, int b, int n, int C, int c, int end,
                     int stride) {
  for (; c < end; c += stride) {
#pragma unroll
    for (int i = 0; i < W - 1; ++i) put(memory, (int64_t(b) * (W - 1) + i) * C + c, raw(s, b, n - W + 1 + i, c));
  }
}

// One of the 2 D numbers relu([x, -x]) of a head's D channels from c0 on
template <int D, int ACTIVATION, typename CHANNELS>
inline float rectified(const thread CHANNELS& s, int b, int t, int c0, int j) {
  const float x = channel<ACTIVATION>(s, b, t, c0 + j % D);
  return max(j < D ? x : -x, 0.0f);
}
// Feature i of K of a head whose projected channels begin at c0. MAP is an activation or a map of the whole vector:
// DPFP of K / 8 channels (Schlag et al. 2021, nu = 4), PRODUCT of the halves of 2 K, HEDGEHOG's logits of K / 2.
template <int K, int MAP, int ACTIVATION, typename CHANNELS>
inline float feature(const thread CHANNELS& s, int b, int t, int c0, int i) {
  if (MAP == DPFP) {
    const int j = i % (K / 4), rolled = (j + K / 4 - 1 - i / (K / 4)) % (K / 4);
    return rectified<K / 8, ACTIVATION>(s, b, t, c0, j) * rectified<K / 8, ACTIVATION>(s, b, t, c0, rolled);
  }
  if (MAP == PRODUCT) return channel<ACTIVATION>(s, b, t, c0 + i) * channel<ACTIVATION>(s, b, t, c0 + K + i);
  if (MAP == HEDGEHOG) return (i < K / 2 ? 2.0f : -2.0f) * channel<ACTIVATION>(s, b, t, c0 + i % (K / 2));
  return activated<MAP>(channel<ACTIVATION>(s, b, t, c0 + i));
}

// One head's vector of K features, K / 32 per lane; where K is no multiple of 32 (values), the last lanes lack one
template <int K> struct Lanes {
  float x[(K + 31) / 32];
};
template <int K> inline void to_softmax(thread Lanes<K>& v) {
  float top = v.x[0], sum = 0.0f;
#pragma unroll
  for (int i = 1; i < K / 32; ++i) top = max(top, v.x[i]);
  top = simd_max(top);
#pragma unroll
  for (int i = 0; i < K / 32; ++i) {
    v.x[i] = exp(v.x[i] - top);
    sum += v.x[i];
  }
  sum = simd_sum(sum);
#pragma unroll
  for (int i = 0; i < K / 32; ++i) v.x[i] /= sum;
}
// What makes a vector one of length 1 (L2), of absolute sum 1 (SUM) or of sum 1 (SIMPLEX)
template <int NORM, int K> inline float norm_factor(const thread Lanes<K>& v, float eps) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < K / 32; ++i) sum += NORM == L2 ? v.x[i] * v.x[i] : NORM == SUM ? abs(v.x[i]) : v.x[i];
  sum = simd_sum(sum);
  return NORM == L2 ? rsqrt(sum + eps) : 1.0f / (NORM == SUM ? max(sum, eps) : sum + eps);
}
template <int K> inline Lanes<K> times(Lanes<K> v, float factor) {
#pragma unroll
  for (int i = 0; i < (K + 31) / 32; ++i) v.x[i] *= factor;
  return v;
}
template <int K, int ACTIVATION, int NORM, int MAP = IDENTITY, typename CHANNELS>
inline Lanes<K> vector_of(const thread CHANNELS& s, int b, int t, int c0, float scale, int lane, float eps = 1e-6f) {
  Lanes<K> v;
#pragma unroll
  for (int i = 0; i < (K + 31) / 32; ++i)
    v.x[i] = K % 32 == 0 || lane + 32 * i < K ? feature<K, MAP, ACTIVATION>(s, b, t, c0, lane + 32 * i) : 0.0f;
  if (MAP == HEDGEHOG) to_softmax(v);
  return times(v, NORM == AS_IS ? scale : scale * norm_factor<NORM>(v, eps));
}

// Pair i of the first DIMS channels of a staged vector turned by the angle of token t: neighbours, or one of each half
template <int DIMS, bool INTERLEAVED, typename CP, typename SP>
inline void turn_pair(threadgroup float* vector, int i, View<CP> cos_, View<SP> sin_, int b, int t) {
  threadgroup float* x = vector + (INTERLEAVED ? 2 * i : i);
  threadgroup float* y = x + (INTERLEAVED ? 1 : DIMS / 2);
  const float c = load(row(cos_, b, t, 0), i), s = load(row(sin_, b, t, 0), i), first = *x;
  *x = first * c - *y * s;
  *y = *y * c + first * s;
}

// The projected channels of heads of K each
template <int K, typename CHANNELS> struct Heads {
  CHANNELS channels;
};
template <int K, typename CHANNELS> inline Heads<K, CHANNELS> heads_of(CHANNELS x) {
  Heads<K, CHANNELS> s;
  s.channels = x;
  return s;
}

// The input of a gate, of channel d (0: of the head), as it is projected or behind the convolution
template <typename P> inline float gate_input(View<P> x, int b, int t, int hv, int d) {
  return load(row(x, b, t, hv), d);
}
template <int K, typename CHANNELS>
inline float gate_input(const thread Heads<K, CHANNELS>& x, int b, int t, int hv, int d) {
  return channel<IDENTITY>(x.channels, b, t, hv * K + d);
}

// A learned factor of channel d
template <typename P> inline float gain(Row<P> weight, int d) { return load(weight, d); }
inline float gain(Row<Absent>, int) { return 1.0f; }

// How log decays come from their projected inputs. `rate` and `bias` belong to SOFTPLUS, where rate is -exp(A_log), and
// SIGMOID, where it is exp(A_log); `constant_` is SIGMOID's bound and LOGSIGMOID's divisor. FORGET's bias is its bound.
template <int KIND, typename X, typename RP, typename BP> struct Gates {
  X x;
  View<RP> rate;
  View<BP> bias;
  float constant_, floor_, shortest, longest;
};
template <int KIND, typename X, typename RP, typename BP>
inline Gates<KIND, X, RP, BP> gates(X x, View<RP> rate, View<BP> bias, float constant_, float floor_, float shortest,
                                    float longest) {
  Gates<KIND, X, RP, BP> g;
  g.x = x;
  g.rate = rate;
  g.bias = bias;
  g.constant_ = constant_;
  g.floor_ = floor_;
  g.shortest = shortest;
  g.longest = longest;
  return g;
}

// The time step of SOFTPLUS, of channel d (0: of the head)
template <int KIND, typename X, typename RP, typename BP>
inline float time_step(const thread Gates<KIND, X, RP, BP>& g, int b, int t, int hv, int d) {
  return clamp(softplus(gate_input(g.x, b, t, hv, d) + load(row(g.bias, 0, 0, hv), d)), g.shortest, g.longest);
}
// What FORGET lets go of: 1 - exp(g)
template <int KIND, typename X, typename RP, typename BP>
inline float forgotten(const thread Gates<KIND, X, RP, BP>& g, int b, int t, int hv, int d) {
  return (1.0f - load(row(g.bias, 0, 0, hv), d)) * sigmoid(-gate_input(g.x, b, t, hv, d));
}
template <typename P> inline float rate_of(View<P> rate, int hv) { return load(row(rate, 0, 0, hv), 0); }
inline float rate_of(View<Absent>, int) { return 1.0f; }
template <int KIND, typename X, typename RP, typename BP>
inline float log_decay(const thread Gates<KIND, X, RP, BP>& g, int b, int t, int hv, int d) {
  const float x = gate_input(g.x, b, t, hv, d);
  if (KIND == GIVEN) return x;
  if (KIND == LOGSIGMOID) return max(-softplus(-x) / g.constant_, g.floor_);
  if (KIND == EXPONENTIAL) return -exp(x);
  const float rate = rate_of(g.rate, hv), bias_ = load(row(g.bias, 0, 0, hv), d);
  if (KIND == SOFTPLUS) return rate * time_step(g, b, t, hv, d);
  if (KIND == SIGMOID) return g.constant_ * sigmoid(rate * (x + bias_));
  const float lost = forgotten(g, b, t, hv, d);  // a small loss and a small rest are both exact
  return lost <= 0.5f ? log1p(-lost) : log(bias_ + (1.0f - bias_) * sigmoid(x));
}

// Output i of a head with what bypasses the recurrence, D v
template <typename DP> inline float with_skip(Row<DP> skip, float y, float v, int i) { return y + load(skip, i) * v; }
inline float with_skip(Row<Absent>, float y, float, int) { return y; }
