// The k experts of each token, best first, ties to the lower index; one SIMD-group per token.
//
// Scores are the softmax or the sigmoids of the logits. Selection may add a correction per expert and keep only the
// best groups of experts, ranked by the sum of their two best scores (DeepSeek-V3, arXiv:2412.19437); weights are
// scores without the correction, divided by their sum + sum_eps where NORMALIZED, times a factor.

// E values over the lanes of a SIMD-group: value lane + 32 j in x[j]
template <int M> struct Scores {
  float x[M];
};

// The largest value with an index in [first, end), and that index; `end` if that value is NaN.
template <int M> inline int best(const thread Scores<M>& s, int first, int end, int lane, thread float& value) {
  float top = -INFINITY;
#pragma unroll
  for (int j = 0; j < M; ++j)
    if (lane + 32 * j >= first && lane + 32 * j < end) top = max(top, s.x[j]);
  value = simd_max(top);
  int index = end;
#pragma unroll
  for (int j = M - 1; j >= 0; --j)
    if (lane + 32 * j >= first && lane + 32 * j < end && s.x[j] == value) index = lane + 32 * j;
  return simd_min(index);
}
template <int M> inline void remove(thread Scores<M>& s, int index, int lane) {
#pragma unroll
  for (int j = 0; j < M; ++j)
    if (lane + 32 * j == index) s.x[j] = -INFINITY;
}
template <int M> inline float score_of(const thread Scores<M>& s, int index, int lane) {
  float x = 0.0f;
#pragma unroll
  for (int j = 0; j < M; ++j)
    if (lane + 32 * j == index) x = s.x[j];
  return simd_sum(x);
}

template <int E, bool SOFTMAX, typename LP> inline Scores<(E + 31) / 32> scores_of(Row<LP> logits, int lane) {
  constexpr int M = (E + 31) / 32;
  Scores<M> s;
  float top = -INFINITY, sum = 0.0f;
#pragma unroll
  for (int j = 0; j < M; ++j) {
    s.x[j] = lane + 32 * j < E ? load(logits, lane + 32 * j) : -INFINITY;
    top = max(top, s.x[j]);
  }
  top = SOFTMAX ? simd_max(top) : 0.0f;
#pragma unroll
  for (int j = 0; j < M; ++j) {
    s.x[j] = SOFTMAX ? exp(s.x[j] - top) : sigmoid(s.x[j]);
    sum += s.x[j];
  }
  if (SOFTMAX) {
    sum = simd_sum(sum);
#pragma unroll
    for (int j = 0; j < M; ++j) s.x[j] /= sum;
  }
  return s;
}

// Takes all but the best GROUPS_KEPT of GROUPS equal groups out of the choice.
template <int E, int GROUPS, int GROUPS_KEPT, int M> inline void keep_groups(thread Scores<M>& choice, int lane) {
  constexpr int SIZE = E / GROUPS;
  Scores<(GROUPS + 31) / 32> ranks;
#pragma unroll
  for (int j = 0; j < (GROUPS + 31) / 32; ++j) ranks.x[j] = -INFINITY;
  for (int g = 0; g < GROUPS; ++g) {
    Scores<M> rest = choice;
    float top, second_;
    remove(rest, best(rest, g * SIZE, (g + 1) * SIZE, lane, top), lane);
    best(rest, g * SIZE, (g + 1) * SIZE, lane, second_);
#pragma unroll
    for (int j = 0; j < (GROUPS + 31) / 32; ++j)
      if (lane + 32 * j == g) ranks.x[j] = top + second_;
  }
  Scores<M> kept;
#pragma unroll
  for (int j = 0; j < M; ++j) kept.x[j] = -INFINITY;
  for (int i = 0; i < GROUPS_KEPT; ++i) {
    float value;
    const int g = best(ranks, 0, GROUPS, lane, value);
    remove(ranks, g, lane);
#pragma unroll
    for (int j = 0; j < M; ++j)
      if ((lane + 32 * j) / SIZE == g) kept.x[j] = choice.x[j];
  }
  choice = kept;
}

template <int E, int TOP, int GROUPS, int GROUPS_KEPT, bool SOFTMAX, bool NORMALIZED, typename LP, typename CP,
          typename W>
inline void router_topk(View<LP> logits, View<CP> correction, int T, float sum_eps, float factor,
                        device uint* indices, device W* weights, uint token, uint lane_) {
  constexpr int M = (E + 31) / 32;
  const int lane = lane_;
  const Scores<M> scores = scores_of<E, SOFTMAX>(row(logits, token / T, token % T, 0), lane);
  Scores<M> choice;
#pragma unroll
  for (int j = 0; j < M; ++j) {
    const int e = lane + 32 * j;
    choice.x[j] = e < E ? scores.x[j] + load(row(correction, 0, 0, 0), e) : -INFINITY;
  }
  if (GROUPS > 1) keep_groups<E, GROUPS, GROUPS_KEPT>(choice, lane);
  int mine = 0;  // lane i keeps the i-th choice
  float weight = 0.0f, sum = 0.0f;
  for (int i = 0; i < TOP; ++i) {
    float value;
    const int index = min(best(choice, 0, E, lane, value), E - 1);  // NaN scores choose nothing
    remove(choice, index, lane);
    const float score = score_of(scores, index, lane);
    sum += score;
    mine = lane == i ? index : mine;
    weight = lane == i ? score : weight;
  }
  if (lane < TOP) {
    indices[int64_t(token) * TOP + lane] = uint(mine);
    weights[int64_t(token) * TOP + lane] = W(weight * (NORMALIZED ? factor / (sum + sum_eps) : factor));
  }
}
