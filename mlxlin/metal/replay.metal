// The state after the first `accepted` tokens of a tape. The same operations on the same numbers in the same order as
// the kernel that wrote the tape, so the same bits.
template <int L, int M, typename ZP, typename BP>
inline void replay_low_rank(thread Part<M>& s, Row<ZP> z, Row<BP> b, int r, int part) {
  write(s, load(z, r), part_of<M, L>(b, part));
}
template <int L, int M> inline void replay_low_rank(thread Part<M>&, Row<Absent>, Row<Absent>, int, int) {}

template <int K, int L, int DECAY, int N, typename SP, typename GP, typename KP, typename UP, typename ZP, typename BP,
          typename COUNTS>
inline void replay(View<SP> S, View<GP> g_, View<KP> k_, View<UP> u_, View<ZP> z_, View<BP> b_, View<COUNTS> accepted,
                   int T, int H, int HV, int V, device float* S_out, uint3 position, uint lane) {
  constexpr int M = K / (4 * L), ROWS = 32 / L;
  const int batch = position.z / HV, hv = position.z % HV, h = hv / (HV / H);
  const int part = lane % L, r = position.y * ROWS + lane / L;
  const int n = real_tokens(accepted, batch, T);
  Row<GP> g = row(g_, batch, 0, hv);
  Row<KP> k = row(k_, batch, 0, h);
  Row<UP> u = row(u_, batch, 0, hv);
  Row<ZP> z = row(z_, batch, 0, hv);
  Row<BP> b = row(b_, batch, 0, h);
  Part<M> s = part_of<M, L>(row(S, batch, hv, r), part);
  for (int t = 0; t < n; ++t) {
    if (DECAY == HEAD_DECAY) apply_decay(s, filled<M>(decay_of(load(g, 0))));
    if (DECAY == CHANNEL_DECAY) apply_decay(s, decays_of(part_of<M, L>(g, part)));
    if (DECAY == VALUE_DECAY) apply_decay(s, filled<M>(decay_of(load(g, r))));
    for (int j = 0; j < N; ++j) {
      write(s, load(u, r), part_of<M, L>(k, part));
      to_next(k);
      to_next(u);
    }
    replay_low_rank<L>(s, z, b, r, part);
    to_next(g);
    to_next(z);
    to_next(b);
  }
  put<L>(S_out, ((int64_t(batch) * HV + hv) * V + r) * K, part, s);
}
