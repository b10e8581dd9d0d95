// RWKV-7's time mixing around the recurrence of decode.metal: one SIMD-group per token.
template <int K, int SIZE, typename KP, typename RP, typename GP, typename AP>
inline void stage_removal(threadgroup float* keys, threadgroup float* a, threadgroup float* b, View<KP> k,
                          View<RP> rate, View<GP> k_k, View<AP> k_a, float eps, Place p) {
  for (int t = p.group; t < p.n; t += p.groups) {
    const Removal<K> x = removal_of<K>(row(k, p.batch, t, p.hv), row(rate, p.batch, t, p.hv), row(k_k, 0, 0, p.hv),
                                       row(k_a, 0, 0, p.hv), eps, p.lane);
#pragma unroll
    for (int i = 0; i < K / 32; ++i) {
      const int d = t * SIZE + p.lane + 32 * i;
      keys[d] = x.key.x[i];
      a[d] = x.a.x[i];
      b[d] = x.b.x[i];
    }
  }
}

template <int K, int SIZE, int KEYS, int VALUES, typename VP, typename RP, typename WP, typename BP, typename GP,
          typename Y>
inline void finish_time_mix(const threadgroup float* records, View<VP> v, View<RP> r_k, View<WP> gain, View<BP> bias,
                            View<GP> gate, float eps, device Y* y, int T, int H, Place p) {
  for (int t = p.group; t < T; t += p.groups) {
    const threadgroup float* x = records + t * SIZE;
    finish_head<K>(staged(x + VALUES), staged(x), staged(x + KEYS), row(r_k, 0, 0, p.hv), row(v, p.batch, t, p.hv),
                   row(gain, 0, 0, p.hv), row(bias, 0, 0, p.hv), row(gate, p.batch, t, p.hv), eps,
                   y + ((int64_t(p.batch) * T + t) * H + p.hv) * K, t < p.n, p.lane);
  }
}
