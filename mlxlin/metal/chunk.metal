// The state over all chunks of 16 tokens, from what prep computed; see there for the formulas.
//
// A SIMD-group owns 8 NC columns of values: its part of the state, transposed to [K, 8 NC], stays in registers as 8x8
// matrices. Per chunk every tile of queries and keys is loaded once for all NC matrices beside each other.

template <int NC, typename P>
inline Columns<NC> load_values(View<P> v, int batch, int start, int n, int hv, int v0, Position at) {
  Columns<NC> x = zero_columns<NC>();
#pragma unroll
  for (int lower = 0; lower < 2; ++lower) {
    const int t = at.row + 8 * lower;
    const Row<P> values = row(v, batch, start + t, hv);
#pragma unroll
    for (int c = 0; c < NC; ++c)
      if (t < n) x.m[lower][c] = pair_of(values, v0 + 8 * c + at.column);
  }
  return x;
}

// Sub-token s ends token s / N if it is its last; `out` points to the columns of token 0.
template <int NC, int N, typename Y>
inline void store_outputs(Columns<NC> x, device Y* out, int64_t next_token, int start, int n, Position at) {
#pragma unroll
  for (int lower = 0; lower < 2; ++lower) {
    const int t = at.row + 8 * lower;
    if (t < n && (start + t) % N == N - 1) {
      device Y* p = out + (start + t) / N * next_token + at.column;
#pragma unroll
      for (int c = 0; c < NC; ++c) {
        p[8 * c] = Y(first(x.m[lower][c]));
        p[8 * c + 1] = Y(second(x.m[lower][c]));
      }
    }
  }
}

template <int NK, int NC> struct State {
  Matrix m[NK][NC];  // [K, 8 NC]
};

template <int NK, int NC, typename P>
inline State<NK, NC> load_state(View<P> S, int batch, int hv, int v0, Position at) {
  State<NK, NC> s;
#pragma unroll
  for (int c = 0; c < NC; ++c) {
    const int v = v0 + 8 * c + at.column;
    const Row<P> left = row(S, batch, hv, v), right = row(S, batch, hv, v + 1);
#pragma unroll
    for (int i = 0; i < NK; ++i) s.m[i][c] = matrix_of(load(left, 8 * i + at.row), load(right, 8 * i + at.row));
  }
  return s;
}

template <int NK, int NC> inline void store_state(State<NK, NC> s, device float* out, Position at) {
#pragma unroll
  for (int c = 0; c < NC; ++c) {
    device float* p = out + int64_t(8 * c + at.column) * (8 * NK) + at.row;
#pragma unroll
    for (int i = 0; i < NK; ++i) {
      p[8 * i] = first(s.m[i][c]);
      p[8 * i + 8 * NK] = second(s.m[i][c]);
    }
  }
}

// What the state answers to its readers (keys or a) and to the queries
template <int WRITE, int NK, int NC, typename TILES>
inline void read_state(const thread State<NK, NC>& s, const thread TILES& tiles, thread Columns<NC>& answers,
                       thread Columns<NC>& outputs, Position at) {
#pragma unroll
  for (int i = 0; i < NK; ++i) {
#pragma unroll
    for (int lower = 0; lower < 2; ++lower) {
      const Matrix q = tiles.querying(i, lower, at);
#pragma unroll
      for (int c = 0; c < NC; ++c) multiply_add(outputs.m[lower][c], q, s.m[i][c]);
      if (WRITE != ADD) {
        const Matrix x = tiles.reading(i, lower);
#pragma unroll
        for (int c = 0; c < NC; ++c) multiply_add(answers.m[lower][c], x, s.m[i][c]);
      }
    }
  }
}

// S = S o decay + keys^T u (+ b^T z), here transposed
template <int WRITE, int NK, int NC, typename TILES>
inline void write_state(thread State<NK, NC>& s, const thread TILES& tiles, Columns<NC> u, Columns<NC> z, Position at) {
#pragma unroll
  for (int i = 0; i < NK; ++i) {
    const float decay = tiles.state_decay(i, at);
#pragma unroll
    for (int c = 0; c < NC; ++c) s.m[i][c] = decayed(s.m[i][c], decay);
#pragma unroll
    for (int lower = 0; lower < 2; ++lower) {
      const Matrix k = tiles.writing(i, lower);
#pragma unroll
      for (int c = 0; c < NC; ++c) multiply_add(s.m[i][c], k, u.m[lower][c]);
      if (WRITE == LOW_RANK) {
        const Matrix b = tiles.writing_back(i, lower);
#pragma unroll
        for (int c = 0; c < NC; ++c) multiply_add(s.m[i][c], b, z.m[lower][c]);
      }
    }
  }
}

template <int K, int NC, int WRITE, int N, typename TILES, typename VP, typename SP, typename LENGTHS, typename XP,
          typename AK, typename PB, typename Y>
inline void chunk(TILES tiles, View<VP> v, View<SP> S, View<LENGTHS> lengths, XP X, AK Ak, const device float* P, PB Pb,
                  int T, int H, int HV, int V, device Y* y, device float* S_out, uint3 position, uint lane) {
  const int batch = position.z / HV, hv = position.z % HV, h = hv / (HV / H), v0 = position.y * 8 * NC;
  const int tokens = real_tokens(lengths, batch, T), chunks = (T * N + 15) / 16;
  const int64_t head = int64_t(batch) * HV + hv, next_token = int64_t(HV) * V;
  const Position at = position_of(lane);
  device Y* out = y + (int64_t(batch) * T * next_token + int64_t(hv) * V + v0);

  State<K / 8, NC> s = load_state<K / 8, NC>(S, batch, hv, v0, at);
  for (int start = 0; start < tokens * N; start += 16) {
    const int n = tokens * N - start;
    const int64_t index = head * chunks + start / 16;
    tiles.enter(index, batch, h, start, n, at);
    Columns<NC> answers = zero_columns<NC>(), outputs = zero_columns<NC>(), z = zero_columns<NC>();
    read_state<WRITE>(s, tiles, answers, outputs, at);
    tiles.decay_answers(answers);
    tiles.decay_answers(outputs);
    Columns<NC> u = load_values<NC>(v, batch, start, n, hv, v0, at);
    if (WRITE == LOW_RANK) {
      multiply_add(answers, triangle(offset_by(Ak, index * 192)), u);
      z = solved(triangle(offset_by(X, index * 192)), answers);
      multiply_add(outputs, triangle(offset_by(Pb, index * 192)), z);
    }
    if (WRITE == DELTA) u = solved(triangle(offset_by(X, index * 192)), difference(u, answers));
    multiply_add(outputs, triangle(P + index * 192), u);
    store_outputs<NC, N>(outputs, out, next_token, start, n, at);
    tiles.decay_writes(u);
    write_state<WRITE>(s, tiles, u, z, at);
  }
  for (int t = tokens; t < T; ++t) {
    for (int e = lane; e < 8 * NC; e += 32) out[t * next_token + e] = Y(0.0f);
  }
  store_state(s, S_out + (head * V + v0) * K, at);
}
