// What stands between a mixer's projections and its recurrence: short convolution, activation, unit norm, gates.
enum DecayKind { GIVEN, SOFTPLUS, SIGMOID, LOGSIGMOID, EXPONENTIAL, FORGET };
enum Activation { IDENTITY, SILU, GATE_SIGMOID, RELU, ELU_PLUS_ONE };

inline float sigmoid(float x) { return 1.0f / (1.0f + exp(-x)); }
inline float softplus(float x) { return max(x, 0.0f) + log1p(exp(-abs(x))); }

template <int ACTIVATION> inline float activated(float x) {
  if (ACTIVATION == SILU) return x * sigmoid(x);
  if (ACTIVATION == GATE_SIGMOID) return sigmoid(x);
  if (ACTIVATION == RELU) return max(x, 0.0f);
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

// One head's vector of K channels from c0 on, K / 32 per lane, of unit length times `scale` where NORMED.
template <int K> struct Lanes {
  float x[K / 32];
};
template <int K, int ACTIVATION, bool NORMED, int W, typename XP, typename MP, typename WP, typename BP>
inline Lanes<K> vector_of(const thread Channels<W, XP, MP, WP, BP>& s, int b, int t, int c0, float scale, int lane) {
  Lanes<K> v;
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < K / 32; ++i) {
    v.x[i] = channel<ACTIVATION>(s, b, t, c0 + lane + 32 * i);
    squares += v.x[i] * v.x[i];
  }
  if (NORMED) scale *= rsqrt(simd_sum(squares) + 1e-6f);
#pragma unroll
  for (int i = 0; i < K / 32; ++i) v.x[i] *= scale;
  return v;
}

// How log decays come from their projected inputs. `rate` and `bias` belong to SOFTPLUS, where rate is -exp(A_log), and
// SIGMOID, where it is exp(A_log); `constant_` is SIGMOID's bound and LOGSIGMOID's divisor. FORGET's bias is its bound.
template <int KIND, typename GP, typename RP, typename BP> struct Gates {
  View<GP> x;
  View<RP> rate;
  View<BP> bias;
  float constant_, floor_, shortest, longest;
};
template <int KIND, typename GP, typename RP, typename BP>
inline Gates<KIND, GP, RP, BP> gates(View<GP> x, View<RP> rate, View<BP> bias, float constant_, float floor_,
                                     float shortest, float longest) {
  Gates<KIND, GP, RP, BP> g;
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
template <int KIND, typename GP, typename RP, typename BP>
inline float time_step(const thread Gates<KIND, GP, RP, BP>& g, int b, int t, int hv, int d) {
  return clamp(softplus(load(row(g.x, b, t, hv), d) + load(row(g.bias, 0, 0, hv), d)), g.shortest, g.longest);
}
// What FORGET lets go of: 1 - exp(g)
template <int KIND, typename GP, typename RP, typename BP>
inline float forgotten(const thread Gates<KIND, GP, RP, BP>& g, int b, int t, int hv, int d) {
  return (1.0f - load(row(g.bias, 0, 0, hv), d)) * sigmoid(-load(row(g.x, b, t, hv), d));
}
template <typename P> inline float rate_of(View<P> rate, int hv) { return load(row(rate, 0, 0, hv), 0); }
inline float rate_of(View<Absent>, int) { return 1.0f; }
template <int KIND, typename GP, typename RP, typename BP>
inline float log_decay(const thread Gates<KIND, GP, RP, BP>& g, int b, int t, int hv, int d) {
  const float x = load(row(g.x, b, t, hv), d);
  if (KIND == GIVEN) return x;
  if (KIND == LOGSIGMOID) return max(-softplus(-x) / g.constant_, g.floor_);
  if (KIND == EXPONENTIAL) return -exp(x);
  const float rate = rate_of(g.rate, hv), bias_ = load(row(g.bias, 0, 0, hv), d);
  if (KIND == SOFTPLUS) return rate * time_step(g, b, t, hv, d);
  if (KIND == SIGMOID) return g.constant_ * sigmoid(rate * (x + bias_));
  const float lost = forgotten(g, b, t, hv, d);  // a small loss and a small rest are both exact
  return lost <= 0.5f ? log1p(-lost) : log(bias_ + (1.0f - bias_) * sigmoid(x));
}
