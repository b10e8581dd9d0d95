// prep for one decay per channel; one SIMD-group per chunk and value head, one lane per channel of a slab.
//
// The decay of channel d after token j up to token t is split at a border between them: with h the highest bit in which
// t and j differ, t lies in the upper and j in the lower half of one block of 2 h tokens, and
//   E_tj = (decay from the border through t) (decay after j up to the border),
// two products of single decays, each at most 1 whatever the gates. So four levels h = 8, 4, 2, 1 of 8x8 products,
// masked, give every pair exactly once.

struct Tokens {
  float w[C], k[C], q[C], a[C], b[C];  // of this lane's channel; w = exp(g)
};

template <typename P> inline void load_tokens(thread float* x, View<P> x_, int batch, int start, int n, int h, int d) {
#pragma unroll
  for (int t = 0; t < C; ++t) x[t] = t < n ? load(row(x_, batch, start + t, h), d) : 0.0f;
}
inline void load_tokens(thread float* x, View<Absent>, int, int, int, int, int) {
#pragma unroll
  for (int t = 0; t < C; ++t) x[t] = 0.0f;
}

// Tiles [K / 8, 2, 8, 8] of one chunk, as the chunk kernel reads them; transposed: channels by tokens.
inline int tile_at(int d, int t) { return (d / 8 * 2 + t / 8) * 64 + t % 8 * 8 + d % 8; }
inline int transposed_tile_at(int d, int t) { return (d / 8 * 2 + t / 8) * 64 + d % 8 * 8 + t % 8; }

// Decayed from the start of the chunk: queries and delta keys through their token, a up to the token before.
// Decayed to its end: keys and b.
template <int WRITE, typename XD, typename BD>
inline void store_decayed(const thread Tokens& x, XD Xd, device float* Qd, device float* Kd, BD Bd, int d) {
  float before = 1.0f, after = 1.0f;
#pragma unroll
  for (int t = 0; t < C; ++t) {
    const float through = before * x.w[t];
    Qd[tile_at(d, t)] = x.q[t] * through;
    put(Xd, tile_at(d, t), WRITE == LOW_RANK ? x.a[t] * before : x.k[t] * through);
    before = through;
  }
#pragma unroll
  for (int t = C - 1; t >= 0; --t) {
    Kd[transposed_tile_at(d, t)] = x.k[t] * after;
    put(Bd, transposed_tile_at(d, t), x.b[t] * after);
    after *= x.w[t];
  }
}

// Stage level h: `first` gets readers (delta keys or a) of upper tokens and keys of lower ones, `second` queries and b.
template <int h, int WRITE>
inline void stage(const thread Tokens& x, threadgroup float* first, threadgroup float* second, int lane) {
  float factor = 1.0f;
#pragma unroll
  for (int t = 0; t < C; ++t) {
    if (t % h == 0) factor = 1.0f;
    const float before = factor;
    factor *= x.w[t];
    if (t & h) {
      first[t * LD + lane] = WRITE == LOW_RANK ? x.a[t] * before : x.k[t] * factor;
      second[t * LD + lane] = x.q[t] * factor;
    }
  }
#pragma unroll
  for (int t = C - 1; t >= 0; --t) {
    if (t % h == h - 1) factor = 1.0f;
    if (!(t & h)) {
      first[t * LD + lane] = x.k[t] * factor;
      second[t * LD + lane] = x.b[t] * factor;
    }
    factor *= x.w[t];
  }
}

// The products readers.keys, readers.b, queries.keys and queries.b of pairs of tokens
struct Grams {
  Triangle xk, xb, qk, qb;
};

// Add to a block the products of tokens t, j <= t whose highest differing bit is h (0: of each token with itself).
inline bool belongs(int t, int j, int h) { return t >= j && (t ^ j) >= h && (t ^ j) < max(2 * h, 1); }
inline void add_pairs(thread Triangle& sum, int block, int h, threadgroup float* rows, threadgroup float* columns,
                      Position at) {
  const int t = at.row + block_row(block), j = at.column + block_column(block);
  const bool left = belongs(t, j, h), right = belongs(t, j + 1, h);
#pragma unroll
  for (int d = 0; d < SLAB; d += 8) {
    Matrix product = zero();
    multiply_add(product, tile(rows + block_row(block) * LD + d, LD),
                 transposed_tile(columns + block_column(block) * LD + d, LD));
    sum.m[block] = plus(sum.m[block], matrix_of(left ? first(product) : 0.0f, right ? second(product) : 0.0f));
  }
}

template <int h, int WRITE>
inline void add_level(thread Grams& grams, const thread Tokens& x, threadgroup float* first, threadgroup float* second,
                  int lane, Position at) {
  simdgroup_barrier(mem_flags::mem_threadgroup);
  stage<h, WRITE>(x, first, second, lane);
  simdgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
  for (int block = 0; block < 3; ++block) {
    if ((block == 1) == (h == 8)) {
      add_pairs(grams.qk, block, h, second, first, at);
      if (WRITE != ADD) add_pairs(grams.xk, block, h, first, first, at);
      if (WRITE == LOW_RANK) {
        add_pairs(grams.xb, block, h, first, second, at);
        add_pairs(grams.qb, block, h, second, second, at);
      }
    }
  }
}

// The products of each query with its own token's key (or b)
inline void own_products(thread Triangle& gram, const thread float* q, const thread float* k, threadgroup float* first,
                         threadgroup float* second, int lane, Position at) {
  simdgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
  for (int t = 0; t < C; ++t) {
    first[t * LD + lane] = k[t];
    second[t * LD + lane] = q[t];
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
  add_pairs(gram, 0, 0, second, first, at);
  add_pairs(gram, 2, 0, second, first, at);
}

template <int K, int WRITE, typename QP, typename KP, typename GP, typename BETA, typename AP, typename BP,
          typename LENGTHS, typename XD, typename BD, typename X_OUT, typename AK, typename PB>
inline void prep_channel(View<QP> q, View<KP> k, View<GP> g, View<BETA> beta_, View<AP> a, View<BP> b,
                         View<LENGTHS> lengths, int T, int H, int HV, XD Xd, device float* Qd, device float* Kd, BD Bd,
                         X_OUT X, AK Ak, device float* P, PB Pb, device float* G, threadgroup float* first,
                         uint3 position, uint lane) {
  const int batch = position.z / HV, hv = position.z % HV, h = hv / (HV / H), chunk = position.y;
  const int start = chunk * C, n = real_tokens(lengths, batch, T) - start;
  const int64_t at = (int64_t(batch) * HV + hv) * ((T + C - 1) / C) + chunk;
  const Position p = position_of(lane);
  threadgroup float* second = first + C * LD;
  Grams grams;
  grams.xk = grams.xb = grams.qk = grams.qb = zero_triangle();
  for (int d = lane; d < K; d += SLAB) {
    Tokens x;
    load_tokens(x.q, q, batch, start, n, h, d);
    load_tokens(x.k, k, batch, start, n, h, d);
    load_tokens(x.a, a, batch, start, n, h, d);
    load_tokens(x.b, b, batch, start, n, h, d);
    load_tokens(x.w, g, batch, start, n, hv, d);
    float sum = 0.0f;
#pragma unroll
    for (int t = 0; t < C; ++t) {
      sum += x.w[t];
      x.w[t] = exp(x.w[t]);
    }
    G[at * K + d] = decay_of(sum);
    store_decayed<WRITE>(x, offset_by(Xd, at * C * K), Qd + at * C * K, Kd + at * C * K, offset_by(Bd, at * C * K), d);
    add_level<8, WRITE>(grams, x, first, second, lane, p);
    add_level<4, WRITE>(grams, x, first, second, lane, p);
    add_level<2, WRITE>(grams, x, first, second, lane, p);
    add_level<1, WRITE>(grams, x, first, second, lane, p);
    own_products(grams.qk, x.q, x.k, first, second, lane, p);
    if (WRITE == LOW_RANK) own_products(grams.qb, x.q, x.b, first, second, lane, p);
  }
  store(grams.qk, P + at * 192);
  if (WRITE == DELTA) {
    const int t = lane % C;
    store_solver(grams.xk, t < n ? load(row(beta_, batch, start + t, hv), 0) : 0.0f, offset_by(X, at * 192), lane);
  }
  if (WRITE == LOW_RANK) {
    store(grams.qb, offset_by(Pb, at * 192));
    store(grams.xk, offset_by(Ak, at * 192));
    store_solver(negative(grams.xb), 1.0f, offset_by(X, at * 192), lane);
  }
}
