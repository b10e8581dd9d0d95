// Where the chunk kernel gets its 8x8 tiles of queries and keys from. Tile i covers channels 8 i .., `lower` selects
// tokens 0 .. 7 or 8 .. 15 of the chunk. Tiles for writing are transposed: channels by tokens.

// 16 tokens by 8 NC values
template <int NC> struct Columns {
  Matrix m[2][NC];
};
template <int NC> inline Columns<NC> zero_columns() {
  Columns<NC> x;
#pragma unroll
  for (int c = 0; c < NC; ++c) x.m[0][c] = x.m[1][c] = zero();
  return x;
}
template <int NC> inline void multiply_add(thread Columns<NC>& sum, Triangle x, Columns<NC> y) {
#pragma unroll
  for (int c = 0; c < NC; ++c) multiply_add(sum.m[0][c], sum.m[1][c], x, y.m[0][c], y.m[1][c]);
}
// The solution of a chunk's system for the right-hand sides r, from the triangle that store_solver made
template <int NC> inline Columns<NC> solved(Triangle x, Columns<NC> r) {
  Columns<NC> y = zero_columns<NC>();
#pragma unroll
  for (int c = 0; c < NC; ++c) {
    multiply_add(y.m[0][c], x.m[0], r.m[0][c]);
    multiply_add(r.m[1][c], x.m[1], y.m[0][c]);
    multiply_add(y.m[1][c], x.m[2], r.m[1][c]);
  }
  return y;
}
template <int NC> inline Columns<NC> difference(Columns<NC> x, Columns<NC> y) {
#pragma unroll
  for (int c = 0; c < NC; ++c) {
    x.m[0][c] = matrix_of(first(x.m[0][c]) - first(y.m[0][c]), second(x.m[0][c]) - second(y.m[0][c]));
    x.m[1][c] = matrix_of(first(x.m[1][c]) - first(y.m[1][c]), second(x.m[1][c]) - second(y.m[1][c]));
  }
  return x;
}
template <int NC> inline void decay_rows(thread Columns<NC>& x, float upper, float lower) {
#pragma unroll
  for (int c = 0; c < NC; ++c) {
    x.m[0][c] = decayed(x.m[0][c], upper);
    x.m[1][c] = decayed(x.m[1][c], lower);
  }
}

// No decay or one per head: the raw keys serve reading and writing, so the threadgroup shares one staged copy of them,
// zero past the last token; the decays scale rows of results instead.
template <int K, int N, typename QP, typename KP> struct HeadTiles {
  static constexpr constant int LD = K + 4;
  View<QP> q;
  View<KP> k;
  const device float* G;  // [.., 33], see prep_head
  threadgroup float* keys;
  int group, groups, lane;
  Row<QP> query[2];
  bool reads[2];
  float before[2], after[2], total;

  void enter(int64_t chunk, int batch, int h, int start, int n, Position at) thread {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int t = group; t < 16; t += groups) {
      const Row<KP> key = row(k, batch, start + t, h);
#pragma unroll
      for (int d = 0; d < K; d += 32) keys[t * LD + d + lane] = t < n ? load(key, d + lane) : 0.0f;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const device float* decays = G + chunk * 33;
#pragma unroll
    for (int lower = 0; lower < 2; ++lower) {
      const int t = at.row + 8 * lower;
      query[lower] = row(q, batch, (start + t) / N, h);
      reads[lower] = t < n && (start + t) % N == N - 1;
      before[lower] = decays[t];
      after[lower] = decays[16 + t];
    }
    total = decays[32];
  }
  Matrix reading(int i, int lower) const thread { return tile(keys + lower * 8 * LD + i * 8, LD); }
  Matrix writing(int i, int lower) const thread { return transposed_tile(keys + lower * 8 * LD + i * 8, LD); }
  Matrix writing_back(int, int) const thread { return zero(); }
  Matrix querying(int i, int lower, Position at) const thread {
    return reads[lower] ? pair_of(query[lower], i * 8 + at.column) : zero();
  }
  template <int NC> void decay_answers(thread Columns<NC>& x) const thread { decay_rows(x, before[0], before[1]); }
  template <int NC> void decay_writes(thread Columns<NC>& x) const thread { decay_rows(x, after[0], after[1]); }
  float state_decay(int, Position) const thread { return total; }
};

template <int K, int N, typename QP, typename KP>
inline HeadTiles<K, N, QP, KP> head_tiles(View<QP> q, View<KP> k, const device float* G, threadgroup float* keys,
                                          uint group, int groups, uint lane) {
  HeadTiles<K, N, QP, KP> x;
  x.q = q;
  x.k = k;
  x.G = G;
  x.keys = keys;
  x.group = group;
  x.groups = groups;
  x.lane = lane;
  return x;
}

// One decay per channel: prep wrote decayed tiles, in the order in which they are read here.
template <int K, typename XP, typename BP> struct ChannelTiles {
  XP x;
  const device float* q;
  const device float* k;
  BP b;
  const device float* G;  // over a whole chunk [.., K]
  int64_t chunk;

  void enter(int64_t chunk_, int, int, int, int, Position) thread { chunk = chunk_; }
  int64_t first(int i, int lower) const thread { return (chunk * (K / 4) + 2 * i + lower) * 64; }
  Matrix reading(int i, int lower) const thread { return tile(offset_by(x, first(i, lower)), 8); }
  Matrix writing(int i, int lower) const thread { return tile(k + first(i, lower), 8); }
  Matrix writing_back(int i, int lower) const thread { return tile(offset_by(b, first(i, lower)), 8); }
  Matrix querying(int i, int lower, Position) const thread { return tile(q + first(i, lower), 8); }
  template <int NC> void decay_answers(thread Columns<NC>&) const thread {}
  template <int NC> void decay_writes(thread Columns<NC>&) const thread {}
  float state_decay(int i, Position at) const thread { return G[chunk * K + i * 8 + at.row]; }
};

template <int K, typename XP, typename BP>
inline ChannelTiles<K, XP, BP> channel_tiles(XP x, const device float* q, const device float* k, BP b,
                                             const device float* G) {
  ChannelTiles<K, XP, BP> tiles;
  tiles.x = x;
  tiles.q = q;
  tiles.k = k;
  tiles.b = b;
  tiles.G = G;
  return tiles;
}
