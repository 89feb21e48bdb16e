// The gradient of a bias: dS = P (dP - delta) of every pair, summed over the axes that the bias
// broadcasts. Slopes do not enter, because functions of the score come before the bias is added.
//
// One thread block owns a tile of the result and walks over all pairs of its sum in a fixed order.
// No other block adds to the tile, and nothing quadratic is stored. S and dP are recomputed from Q,
// K, V and dO. Depending on the axes of the bias, a block owns
//   queries and keys   a tile of both, of one entry and head of the bias: it walks over the entries
//                      and heads that share it, and writes the result
//   keys               the keys of a kv tile, of one entry and head of the call: it walks over the
//                      queries. Its sums are partial; steps/reduce_bias.cu adds them up
//   queries or none    the queries of a q tile, in the same way: it walks over the keys
#include "../ptx/barrier.cuh"
#include "../tile/copy.cuh"
#include "../tile/product.cuh"
#include "bias_steps.cuh"
#include "bias_types.cuh"

namespace cuflash::steps {

template <class Config, class Types = BiasGradientTypes<Config>>
struct BiasGradient {
  using Storage = typename Config::Storage;
  using Compute = typename Config::Compute;
  using Scores = typename Types::Scores;
  using Rows = typename Types::Rows;
  using Steps = BiasSteps<Config>;
  const typename Config::Params& params;
  const BiasItem<Config>& item;
  BiasGradientStorage<Config>& shared;
  const int walker;
  const int thread;  // of the walker
  const int row0;    // of this warp, in a tile
  const int key0;
  Scores sum;
  Scores kept;  // the sum of the terms, where it is the same in every step
  Steps ahead;  // the step whose Q and K, or dO and V, are loaded next
  int loaded = 0;
  int multiplied = 0;

  __device__ BiasGradient(const typename Config::Params& params, const BiasItem<Config>& item,
                          BiasGradientStorage<Config>& shared)
      : params(params),
        item(item),
        shared(shared),
        walker(static_cast<int>(threadIdx.x) / Types::threads),
        thread(static_cast<int>(threadIdx.x) % Types::threads),
        row0(thread / 32 / Config::score_grid_columns * Scores::rows),
        key0(thread / 32 % Config::score_grid_columns * Scores::columns),
        ahead(params, item, walker) {
    sum.fill(0);
  }

  // Walks over all pairs of the item; the walkers take steps in turn.
  __device__ void walk() {
    Steps step = ahead;
    load_first();
    keep_terms();
    for (; step.exists(); step.advance()) {
      Rows lse = lse_of(step);
      const Rows delta = delta_of(step);
      Scores p, dp;
      next_slot<0>();
      p.fill(0);
      multiply<Config::head_dim>(p, q(slot<0>()), k(slot<0>()));
      load_next<(Config::slots - 1) % 2>();
      exponentiate(step, p, lse);
      next_slot<1>();
      dp.fill(0);
      multiply<Config::head_dim_v>(dp, dout(slot<1>()), v(slot<1>()));
      if constexpr (Config::Weights::drops) scale_gradients(step, dp);
      load_next<Config::slots % 2>();
      add(p, dp, delta);
    }
    join();
  }

  // Stores the sums of a tile in the result.
  __device__ void store() const {
    using Bias = typename Config::Output;
    const PairArray& to = params.dbias;
    const LanePosition lane;
    const int row = item.q_tiles.begin * Config::block_q + row0 + lane.row;
    const int key = item.kv_tiles.begin * Config::block_kv + key0 + lane.column;
    // A result without an axis of heads has head 0, and stride 0.
    auto* first = static_cast<Bias*>(to.data) + item.result_entry * to.batch_stride +
                  item.heads.begin * to.head_stride + row * to.row_stride + key * to.column_stride;
    const auto address = reinterpret_cast<unsigned long long>(first);
    const bool pairs =
        to.column_stride == 1 && to.row_stride % 2 == 0 && address % sizeof(Pair<Bias>) == 0;
    const bool inside = row - lane.row + Scores::rows <= params.shape.seqlen_q &&
                        key - lane.column + Scores::columns <= params.shape.seqlen_kv;
    const auto numbers = [&](int m, int n, int group) {
      const Compute(&sums)[2] = sum.value[m][n][group];
      return Pair<Bias>{from_compute<Bias>(sums[0]), from_compute<Bias>(sums[1])};
    };
    if (pairs && inside) {
      Scores::for_each_pair([&](int m, int n, int group) {
        Bias* place = first + Scores::row(m, group) * to.row_stride + Scores::column(n);
        *reinterpret_cast<Pair<Bias>*>(place) = numbers(m, n, group);
      });
      return;
    }
    Scores::for_each_pair([&](int m, int n, int group) {
      const int i = Scores::row(m, group), j = Scores::column(n);
      const int left = row + i < params.shape.seqlen_q ? params.shape.seqlen_kv - key - j : 0;
      Bias* place = first + i * to.row_stride + j * to.column_stride;
      if (left > 0) place[0] = numbers(m, n, group).x;
      if (left > 1) place[to.column_stride] = numbers(m, n, group).y;
    });
  }

  // Stores the sums of every query over its keys as partial sums.
  __device__ void store_rows() const {
    static_assert(Config::score_grid_columns == 1 || !Config::by_rows || Config::by_keys,
                  "a row is of one warp");
    const LanePosition lane;
    Compute* to = part(params.shape.seqlen_q);
    const int row = item.q_tiles.begin * Config::block_q + row0 + lane.row;
    Rows rows;
    rows.for_each([&](Compute& total, int m, int group) {
      total = 0;
#pragma unroll
      for (int n = 0; n < Scores::column_fragments; ++n) {
        total += sum.value[m][n][group][0] + sum.value[m][n][group][1];
      }
      total = combine_row_lanes(total, [](Compute a, Compute b) { return a + b; });
      const int i = row + Scores::row(m, group);
      if (lane.column == 0 && i < params.shape.seqlen_q) to[i] = total;
    });
  }

  // Stores the sums of every key over its queries as partial sums.
  __device__ void store_keys() const {
    static_assert(Config::score_grid_rows == 1 || Config::by_rows, "a key is of one warp");
    const LanePosition lane;
    Compute* to = part(params.shape.seqlen_kv);
    const int key = item.kv_tiles.begin * Config::block_kv + key0 + lane.column;
#pragma unroll
    for (int n = 0; n < Scores::column_fragments; ++n) {
#pragma unroll
      for (int which = 0; which < 2; ++which) {
        Compute total = 0;
#pragma unroll
        for (int m = 0; m < Scores::row_fragments; ++m) {
#pragma unroll
          for (int group = 0; group < Scores::row_groups; ++group) {
            total += sum.value[m][n][group][which];
          }
        }
#pragma unroll
        for (int distance = 4; distance < 32; distance *= 2) {
          total += __shfl_xor_sync(0xffffffffu, total, distance);
        }
        const int j = key + Scores::column(n, which);
        if (lane.row == 0 && j < params.shape.seqlen_kv) to[j] = total;
      }
    }
  }

 private:
  __device__ Compute* part(int length) const {
    const long long head =
        static_cast<long long>(item.entries.begin) * params.shape.heads_q + item.heads.begin;
    return static_cast<Compute*>(params.bias_parts) + head * length;
  }

  using Slot = BiasGradientSlot<Config>;
  __device__ static typename Types::QTile q(Slot& slot) { return {slot.queries.data}; }
  __device__ static typename Types::KTile k(Slot& slot) { return {slot.keys.data}; }
  __device__ static typename Types::DoutTile dout(Slot& slot) { return {slot.queries.data}; }
  __device__ static typename Types::VTile v(Slot& slot) { return {slot.keys.data}; }

  // Waits for the threads of this walker.
  __device__ void sync() const {
    if constexpr (Config::walkers == 1) {
      __syncthreads();
    } else {
      ptx::named_barrier(1 + walker, Types::threads);
    }
  }

  // Loads rows of queries and of keys of the step ahead.
  template <class Queries, class Keys>
  __device__ void load(const Queries& queries, const Tensor& of_queries, const Keys& keys,
                       const Tensor& of_keys, int columns) const {
    const Sequence& seq = ahead.seq;
    const int kv_head = ahead.kv_head();
    copy_tile<Config::copies, Types::threads>(
        queries, q_row<const Storage>(of_queries, seq, ahead.head, ahead.q_begin()),
        of_queries.row_stride, seq.seqlen_q - ahead.q_begin(), columns, thread);
    copy_tile<Config::copies, Types::threads>(
        keys, kv_row<const Storage>(of_keys, seq, kv_head, ahead.kv_begin()), of_keys.row_stride,
        seq.seqlen_kv - ahead.kv_begin(), columns, thread);
  }

  // Loads the operands of product 0 or 1 of the step ahead, if there is one, into the slot of the
  // latest product.
  template <int product>
  __device__ void load_next() {
    Slot& to = slot_of<product>(loaded);
    if (ahead.exists()) {
      if constexpr (product == 0) {
        load(q(to), params.q, k(to), params.k, params.shape.head_dim);
      } else {
        load(dout(to), params.dout, v(to), params.v, params.shape.head_dim_v);
        ahead.advance();
      }
    }
    ++loaded;
    commit_copies<Config::copies>();
  }
  template <int i = 1>
  __device__ void load_first() {
    if constexpr (i < Config::slots) {
      load_next<(i - 1) % 2>();
      load_first<i + 1>();
    }
  }

  // Waits for the operands of product 0 or 1. All threads that come here have finished the product
  // before, so its slot may be loaded again.
  template <int product>
  __device__ void next_slot() {
    wait_copies<Config::copies, Config::slots - 2>();
    sync();
    ++multiplied;
  }
  template <int product>
  __device__ Slot& slot() const {
    return slot_of<product>(multiplied - 1);
  }
  // With two slots, each belongs to one product.
  template <int product>
  __device__ Slot& slot_of(int number) const {
    return shared.slots[walker][Config::slots == 2 ? product : number % Config::slots];
  }

  template <int depth, class Queries, class Keys>
  __device__ void multiply(Scores& to, const Queries& queries, const Keys& keys) const {
    Products<Config>::template multiply_ahead<depth>(to, rows_by_depth(queries, row0),
                                                     rows_by_depth(keys, key0));
  }

  // Keeps the sum of the terms where it is the same in every step.
  __device__ void keep_terms() {
    if constexpr (Config::keeps_terms) {
      const int query = item.q_tiles.begin * Config::block_q + row0;
      const int key = item.kv_tiles.begin * Config::block_kv + key0;
      kept.fill(0);
      change_scores<Config>(params, RowsOfQueries{item.entries.begin, item.heads.begin, query, key},
                            kept);
    }
  }

  // The log-sum-exp of this warp's rows in units of logits; plus infinity where P is 0.
  __device__ Rows lse_of(const Steps& step) const {
    const LanePosition lane;
    const Sequence& seq = step.seq;
    Rows rows;
    rows.for_each([&](Compute& x, int m, int group) {
      const int i = step.q_begin() + row0 + lane.row + Scores::row(m, group);
      x = infinity<Compute>();
      if (i >= seq.seqlen_q) return;
      const Compute given =
          *row_number<const typename Config::Statistics>(params.lse, seq, step.head, i);
      const Compute lse = lse_or_dead<Config>(seq, i, given);
      if (lse != -infinity<Compute>()) x = Logits<Config>::from_natural(lse);
    });
    return rows;
  }
  __device__ Rows delta_of(const Steps& step) const {
    const LanePosition lane;
    const Sequence& seq = step.seq;
    const long long first = padded_row(params.shape, seq, step.head, params.padded_rows);
    Rows rows;
    rows.for_each([&](Compute& x, int m, int group) {
      const int i = step.q_begin() + row0 + lane.row + Scores::row(m, group);
      x = i < seq.seqlen_q ? static_cast<const Compute*>(params.delta)[first + i] : Compute(0);
    });
    return rows;
  }

  // Exponentiates raw products to P.
  __device__ void exponentiate(const Steps& step, Scores& p, Rows& lse) const {
    const int row = step.q_begin() + row0, key = step.kv_begin() + key0;
    const bool edge = is_edge_tile<Config>(step.seq, step.q_begin(), step.kv_begin());
    if constexpr (Config::keeps_terms) {
      p.for_each([&](Compute& x, int m, int n, int group, int which) {
        x += kept.value[m][n][group][which];
      });
      if (edge) hide(p, step.seq, row, key);
    } else {
      prepare_scores<Config>(params, p, step.seq, step.head, row, key, edge);
    }
    exponentials<Config>(p, logit_factor<Config>(params),
                         [&](int m, int, int group, int) { return lse.value[m][group]; });
    clear_dead(p, lse);
  }

  // Turns gradients of the kept weights into gradients of all weights.
  __device__ void scale_gradients(const Steps& step, Scores& dp) const {
    const RowsOfQueries place{step.seq.entry, step.head, step.q_begin() + row0,
                              step.kv_begin() + key0};
    KeptPairs<Config, Scores>(params, place).scale_gradients(params, dp);
  }

  __device__ static void hide(Scores& scores, const Sequence& seq, int row, int key) {
    const LanePosition lane;
    scores.for_each([&](Compute& s, int m, int n, int group, int which) {
      const int i = row + lane.row + Scores::row(m, group);
      const int j = key + lane.column + Scores::column(n, which);
      if (!Mask<Config>::visible(seq, i, j)) s = -infinity<Compute>();
    });
  }

  // Clears the weights of dead rows, whatever the rows hold.
  __device__ void clear_dead(Scores& p, Rows& lse) const {
    bool dead = false;
    lse.for_each([&](Compute& x, int, int) { dead |= x == infinity<Compute>(); });
    if (!__any_sync(0xffffffffu, dead)) return;
    p.for_each([&](Compute& x, int m, int, int group, int) {
      if (lse.value[m][group] == infinity<Compute>()) x = 0;
    });
  }

  // Adds P (dP - delta). A pair of weight 0 adds nothing, whatever dP is.
  __device__ void add(const Scores& p, const Scores& dp, const Rows& delta) {
    sum.for_each([&](Compute& x, int m, int n, int group, int which) {
      const Compute weight = p.value[m][n][group][which];
      if (weight != Compute(0)) {
        x = fma(weight, dp.value[m][n][group][which] - delta.value[m][group], x);
      }
    });
  }

  // Adds the sums of all walkers to those of the first, in order.
  __device__ void join() {
    if constexpr (Config::walkers > 1) {
      const auto place = [&](int m, int n, int group, int which) {
        const int element = ((m * Scores::column_fragments + n) * Scores::row_groups + group) * 2;
        return (element + which) * Types::threads + thread;
      };
      __syncthreads();  // no walker reads its tiles any more
      sum.for_each([&](Compute& x, int m, int n, int group, int which) {
        if (walker > 0) shared.sums[walker - 1][place(m, n, group, which)] = x;
      });
      __syncthreads();
      if (walker > 0) return;
#pragma unroll
      for (int other = 1; other < Config::walkers; ++other) {
        sum.for_each([&](Compute& x, int m, int n, int group, int which) {
          x += shared.sums[other - 1][place(m, n, group, which)];
        });
      }
    }
  }
};

template <class Config>
__device__ inline void bias_gradient(const typename Config::Params& params) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<BiasGradientStorage<Config>*>(shared_bytes);
  static_assert(sizeof(BiasGradientStorage<Config>) == Config::shared_bytes,
                "the plan and the kernel disagree about shared memory");
  const BiasItem<Config> item(params, blockIdx.x);
  BiasGradient<Config> gradient(params, item, shared);
  gradient.walk();
  if (gradient.walker > 0) return;
  if constexpr (Config::by_rows && Config::by_keys) {
    gradient.store();
  } else if constexpr (Config::by_keys) {
    gradient.store_keys();
  } else {
    gradient.store_rows();
  }
}

}  // namespace cuflash::steps
