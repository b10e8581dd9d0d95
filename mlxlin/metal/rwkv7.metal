// RWKV-7's time mixing (arXiv:2503.14456) around the recurrence of decode.metal.

// Keys, and the two vectors that take out of the state what a key already says, from k and the rate's logits.
// One SIMD-group per token: keys k (1 + (rate - 1) k_a); removal = unit(k k_k); a = -removal, b = removal rate.
template <int K, int SIZE, typename KP, typename RP, typename GP, typename AP>
inline void stage_removal(threadgroup float* keys, threadgroup float* a, threadgroup float* b, View<KP> k_,
                          View<RP> rate_, View<GP> k_k, View<AP> k_a, float eps, Place p) {
  const int c0 = p.hv * K;
  for (int t = p.group; t < p.n; t += p.groups) {
    const Row<KP> k = row(k_, p.batch, t, 0);
    const Row<RP> rate = row(rate_, p.batch, t, 0);
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < K / 32; ++i) {
      const int c = c0 + p.lane + 32 * i;
      const float x = load(k, c) * load(row(k_k, 0, 0, 0), c);
      squares += x * x;
    }
    const float scale = rsqrt(simd_sum(squares) + eps);
#pragma unroll
    for (int i = 0; i < K / 32; ++i) {
      const int d = t * SIZE + p.lane + 32 * i, c = c0 + p.lane + 32 * i;
      const float key = load(k, c), r = sigmoid(load(rate, c)), removal = key * load(row(k_k, 0, 0, 0), c) * scale;
      keys[d] = key * (1.0f + (r - 1.0f) * load(row(k_a, 0, 0, 0), c));
      a[d] = -removal;
      b[d] = removal * r;
    }
  }
}

// gate (layer_norm(y) gain + bias + (r . k . r_k) v), the norm over the head; zeros past the last real token
template <int K, int V, int SIZE, int KEYS, int VALUES, typename VP, typename RP, typename WP, typename BP, typename GP,
          typename Y>
inline void finish_time_mix(const threadgroup float* records, View<VP> v, View<RP> r_k, View<WP> gain_, View<BP> bias_,
                            View<GP> gate, float eps, device Y* y, int T, int HV, Place p) {
  const int c0 = p.hv * V;
  for (int t = p.group; t < T; t += p.groups) {
    const threadgroup float* x = records + t * SIZE;
    const threadgroup float* out = x + VALUES;
    const bool real = t < p.n;
    float sum = 0.0f, squares = 0.0f, bonus = 0.0f;
    if (real) {
      for (int d = p.lane; d < V; d += 32) sum += out[d];
      for (int d = p.lane; d < K; d += 32) bonus += x[d] * x[KEYS + d] * load(row(r_k, 0, 0, p.hv), d);
    }
    const float mean = simd_sum(sum) / V;
    bonus = simd_sum(bonus);
    if (real)
      for (int d = p.lane; d < V; d += 32) squares += (out[d] - mean) * (out[d] - mean);
    const float norm = rsqrt(simd_sum(squares) / V + eps);
    for (int d = p.lane; d < V; d += 32) {
      const int c = c0 + d;
      float z = 0.0f;
      if (real) {
        z = (out[d] - mean) * norm * load(row(gain_, 0, 0, 0), c) + load(row(bias_, 0, 0, 0), c);
        z = (z + bonus * load(row(v, p.batch, t, 0), c)) * load(row(gate, p.batch, t, 0), c);
      }
      y[((int64_t(p.batch) * T + t) * HV + p.hv) * V + d] = Y(z);
    }
  }
}
