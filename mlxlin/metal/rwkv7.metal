// One vector of RWKV-7's time mixing (arXiv:2503.14456) before and behind the recurrence, by one SIMD-group.

// A key, and the two vectors that take out of the state what it already says, from k and the rate's logits of a head:
// key k (1 + (rate - 1) k_a); removal = unit(k k_k); a = -removal, b = removal rate.
template <int K> struct Removal {
  Lanes<K> key, a, b;
};
template <int K, typename KP, typename RP, typename GP, typename AP>
inline Removal<K> removal_of(Row<KP> k, Row<RP> rate, Row<GP> k_k, Row<AP> k_a, float eps, int lane) {
  Removal<K> x;
#pragma unroll
  for (int i = 0; i < K / 32; ++i) x.key.x[i] = load(k, lane + 32 * i) * load(k_k, lane + 32 * i);
  const float scale = norm_factor<L2>(x.key, eps);
#pragma unroll
  for (int i = 0; i < K / 32; ++i) {
    const int d = lane + 32 * i;
    const float key = load(k, d), r = sigmoid(load(rate, d)), removal = key * load(k_k, d) * scale;
    x.key.x[i] = key * (1.0f + (r - 1.0f) * load(k_a, d));
    x.a.x[i] = -removal;
    x.b.x[i] = removal * r;
  }
  return x;
}

// gate (layer_norm(out) gain + bias + (r . k . r_k) v) of a head; zeros where the token is not real
template <int K, typename OP, typename RP, typename KP, typename UP, typename VP, typename WP, typename BP, typename GP,
          typename Y>
inline void finish_head(Row<OP> out, Row<RP> r, Row<KP> k, Row<UP> r_k, Row<VP> v, Row<WP> gain_, Row<BP> bias,
                        Row<GP> gate, float eps, device Y* y, bool real, int lane) {
  float sum = 0.0f, squares = 0.0f, bonus = 0.0f;
  if (real) {
    for (int d = lane; d < K; d += 32) sum += load(out, d);
    for (int d = lane; d < K; d += 32) bonus += load(r, d) * load(k, d) * load(r_k, d);
  }
  const float mean = simd_sum(sum) / K;
  bonus = simd_sum(bonus);
  if (real)
    for (int d = lane; d < K; d += 32) squares += (load(out, d) - mean) * (load(out, d) - mean);
  const float norm = rsqrt(simd_sum(squares) / K + eps);
  for (int d = lane; d < K; d += 32) {
    float z = 0.0f;
    if (real) {
      z = (load(out, d) - mean) * norm * load(gain_, d) + load(bias, d);
      z = (z + bonus * load(v, d)) * load(gate, d);
    }
    y[d] = Y(z);
  }
}
