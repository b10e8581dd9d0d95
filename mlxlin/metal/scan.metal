// Every rule, token by token: for short sequences, and for shapes and options the chunk kernels do not take.
//
//   S_t = S_{t-1} (diag(exp(g_t)) + a_t b_t^T) + u_t k_t^T        y_t = S_t q_t
//
// or, with a decay per value channel, S_t = diag(exp(g_t)) S_{t-1} + u_t k_t^T.
//
// The rows of S are independent. L lanes share a row, K / L channels each in registers, so a dot product over K costs
// log2(L) shuffles. A SIMD-group runs 32 / L groups of R rows; R > 1 uses each loaded vector for R rows.
// k, v and beta hold N sub-tokens per token: the decay acts before the first, the query reads after the last.
template <int DECAY, int M, int L, typename P> inline Part<M> decays(Row<P> g, int part, int row_) {
  if (DECAY == CHANNEL_DECAY) return decays_of(part_of<M, L>(g, part));
  return filled<M>(decay_of(load(g, DECAY == VALUE_DECAY ? row_ : 0)));
}

template <int K, int L, int R, int DECAY, int WRITE, int N, bool NORMALIZE, typename QP, typename KP, typename VP,
          typename GP, typename BETA, typename AP, typename BP, typename SP, typename ZP, typename LENGTHS, typename Y,
          typename Z_OUT>
inline void scan(View<QP> q_, View<KP> k_, View<VP> v_, View<GP> g_, View<BETA> beta_, View<AP> a_, View<BP> b_,
                 View<SP> S, View<ZP> Z, View<LENGTHS> lengths, int T, int H, int HV, int V, float eps, Y y,
                 device float* S_out, Z_OUT Z_out, uint3 position, uint lane) {
  constexpr int M = K / (4 * L), ROWS = 32 / L;
  const int batch = position.z / HV, hv = position.z % HV, h = hv / (HV / H);
  const int part = lane % L, v0 = position.y * (ROWS * R) + lane / L;  // rows v0, v0 + ROWS, ...
  const int64_t head = int64_t(batch) * HV + hv;
  const int n = real_tokens(lengths, batch, T);

  Row<QP> q = row(q_, batch, 0, h);
  Row<KP> k = row(k_, batch, 0, h);
  Row<VP> v = row(v_, batch, 0, hv);
  Row<AP> a = row(a_, batch, 0, h);
  Row<BP> b = row(b_, batch, 0, h);
  Row<GP> g = row(g_, batch, 0, hv);
  Row<BETA> beta = row(beta_, batch, 0, hv);
  Part<M> s[R], z = part_of<M, L>(row(Z, 0, batch, hv), part);
#pragma unroll
  for (int r = 0; r < R; ++r) s[r] = part_of<M, L>(row(S, batch, hv, v0 + r * ROWS), part);

  for (int t = 0; t < T; ++t) {
    const int64_t at = ((int64_t(batch) * T + t) * HV + hv) * V + v0;
    float out[R];
    if (t < n) {
      for (int j = 0; j < N; ++j) {
        const Part<M> kk = part_of<M, L>(k, part);
        float answer[R];
        if (WRITE == LOW_RANK) {  // a reads before the decay
          const Part<M> aa = part_of<M, L>(a, part);
#pragma unroll
          for (int r = 0; r < R; ++r) answer[r] = read<L>(s[r], aa);
        }
        if (DECAY != NO_DECAY && j == 0) {
          Part<M> w = decays<DECAY, M, L>(g, part, v0);
#pragma unroll
          for (int r = 0; r < R; ++r) {
            if (DECAY == VALUE_DECAY && r > 0) w = decays<DECAY, M, L>(g, part, v0 + r * ROWS);
            apply_decay(s[r], w);
          }
        }
#pragma unroll
        for (int r = 0; r < R; ++r) {
          float u = load(v, v0 + r * ROWS);
          if (WRITE == DELTA) u = load(beta, 0) * (u - read<L>(s[r], kk));
          write(s[r], u, kk);
        }
        if (WRITE == LOW_RANK) {
          const Part<M> bb = part_of<M, L>(b, part);
#pragma unroll
          for (int r = 0; r < R; ++r) write(s[r], answer[r], bb);
        }
        if (NORMALIZE) write(z, 1.0f, kk);
        to_next(k);
        to_next(v);
        to_next(beta);
      }
      const Part<M> qq = part_of<M, L>(q, part);
      const float norm = NORMALIZE ? read<L>(z, qq) + eps : 1.0f;
#pragma unroll
      for (int r = 0; r < R; ++r) out[r] = NORMALIZE ? read<L>(s[r], qq) / norm : read<L>(s[r], qq);
      to_next(q);
      to_next(a);
      to_next(b);
      to_next(g);
    }
#pragma unroll
    for (int r = 0; r < R; ++r)
      if (part == 0) put(y, at + r * ROWS, t < n ? out[r] : 0.0f);
  }
#pragma unroll
  for (int r = 0; r < R; ++r) put<L>(S_out, (head * V + v0 + r * ROWS) * K, part, s[r]);
  if (NORMALIZE && v0 == 0) put<L>(Z_out, head * K, part, z);
}
