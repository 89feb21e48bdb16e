// FlashAttention-3 forward, the load role: one thread brings Q, K and V through the copy engine and
// draws the tiles.
#pragma once

#include "forward_stored.cuh"
#include "forward_tail.cuh"

namespace cuflash::fa3 {

template <class Config, class Types = ForwardTypes<Config>>
struct ForwardLoader {
  const ForwardContext<Config>& c;
  PipelineState<Config::q_stages> q_place;
  PipelineState<Config::num_stages> k_place;
  PipelineState<Config::num_stages> v_place;
  PipelineState<2> queue_place;
  TailLoads<Config> tails;
  StoredLoads<Config> stored;
  static constexpr bool has_operand = Config::operand_stages > 0;
  PipelineState<has_operand ? Config::operand_stages : 1> operand_place;

  __device__ explicit ForwardLoader(const ForwardContext<Config>& c) : c(c) {}

  __device__ void load_q(const ForwardTile<Config>& tile) {
#pragma unroll 1
    for (int w = 0; w < Types::warpgroups; ++w) {
      auto& full = c.shared.q_full[q_place.stage][w];
      wait_empty<Config>(c.shared.q_empty[q_place.stage][w], q_place.phase);
      arrive_expecting<Config>(full, Types::QPanels::bytes);
      load_panels(c.shared.q[q_place.stage][w], &c.params.q_map, ptx::shared_address(&full),
                  static_cast<int>(tile.seq.q_row0) + tile.q_begin() + w * kRowsOfWarpgroup,
                  tile.item.head, tile.seq.batch, ptx::kEvictFirst);
    }
    q_place.advance();
  }

  // Where blocks are listed, also writes the note for the math roles.
  __device__ void load_k(const ForwardTile<Config>& tile, int block, int note = 0) {
    const auto found = find(tile, block);
    if constexpr (Config::Stored::converts) {
      load_stored<StoredK<Config>>(&c.params.k_map, StoredKind::keys, tile, block, found);
      return;
    }
    wait_empty<Config>(c.shared.k_empty[k_place.stage], k_place.phase);
    if constexpr (Config::listed) c.shared.notes[k_place.stage] = note;
    load_kv(c.shared.k[k_place.stage], &c.params.k_map, c.shared.k_full[k_place.stage], tile, block,
            found);
    k_place.advance();
    load_operand(tile, block);
  }

  // Where a term of the scores reads an array: loads the array's tile for a block of keys.
  __device__ void load_operand(const ForwardTile<Config>& tile, int block) {
    if constexpr (has_operand) {
      wait_empty<Config>(c.shared.operand_empty[operand_place.stage], operand_place.phase);
      load_operand_tile<Config>(c.shared, c.params, operand_place.stage, tile.item.entry,
                                tile.item.head, tile.q_begin(), block * Config::block_kv);
      operand_place.advance();
    }
  }

  __device__ void load_v(const ForwardTile<Config>& tile, int block) {
    auto& v = c.shared.v[v_place.stage];
    const auto found = find(tile, block);
    if constexpr (Config::Stored::converts) {
      load_stored<StoredV<Config>>(&c.params.v_map, StoredKind::values, tile, block, found);
      return;
    }
    wait_empty<Config>(c.shared.v_empty[v_place.stage], v_place.phase);
    if constexpr (Config::Lengths::vary) {
      const int count = rows_before_tail<Config>(tile.seq, block * Config::block_kv);
      if (count < Config::block_kv) {
        tails.announce(c.shared.tail, v_place.stage, count, sizeof(v));
        copy_kv(v, &c.params.v_map, c.shared.tail.raw, tile, block, found);
        v_place.advance();
        return;
      }
    }
    load_kv(v, &c.params.v_map, c.shared.v_full[v_place.stage], tile, block, found);
    v_place.advance();
  }

  // Tells the warps beside load that the last block of all tiles has been loaded.
  __device__ void end() {
    if constexpr (Config::Stored::converts) {
      stored.end(c.shared.stored);
    } else if constexpr (Config::Lengths::vary) {
      tails.end(c.shared.tail);
    }
  }

  __device__ void pass_on(const ForwardTile<Config>& tile) {
    if constexpr (Config::Lengths::vary) {
      pass_on_item<Config>(c.shared.queue, queue_place, {tile.item, tile.seq});
    } else {
      pass_on_item<Config>(c.shared.queue, queue_place, {tile.item});
    }
  }
  // Tells the math roles that there are no more tiles.
  __device__ void pass_on_nothing() {
    pass_on_item<Config>(c.shared.queue, queue_place, {no_item()});
  }

 private:
  using Found = typename Config::Keys::Found;

  // Finds where a block's keys lie; called before the block's stage is free.
  __device__ Found find(const ForwardTile<Config>& tile, int block) const {
    return Config::Keys::template find<Config>(c.params, tile.seq, block * Config::block_kv);
  }
  // Loads the bytes of a block, which other warps convert.
  template <class Bytes>
  __device__ void load_stored(const TensorMap* map, StoredKind kind,
                              const ForwardTile<Config>& tile, int block, const Found& found) {
    const int count = rows_before_tail<Config>(tile.seq, block * Config::block_kv);
    const unsigned stage = stored.begin(c.shared.stored, kind, count);
    load_kv(reinterpret_cast<Bytes&>(c.shared.stored_bytes[stage]), map,
            c.shared.stored.full[stage], tile, block, found);
  }
  template <class Matrix>
  __device__ void load_kv(Matrix& matrix, const TensorMap* map, Barrier& full,
                          const ForwardTile<Config>& tile, int block, const Found& found) {
    arrive_expecting<Config>(full, Matrix::bytes);
    copy_kv(matrix, map, full, tile, block, found);
  }
  template <class Matrix>
  __device__ void copy_kv(Matrix& matrix, const TensorMap* map, Barrier& full,
                          const ForwardTile<Config>& tile, int block, const Found& found) {
    if constexpr (Config::Keys::paged) {
      Config::Keys::load(matrix, map, ptx::shared_address(&full), c.params, tile.seq, tile.kv_head,
                         block * Config::block_kv, found);
    } else {
      load_panels(matrix, map, ptx::shared_address(&full),
                  static_cast<int>(tile.seq.kv_row0) + block * Config::block_kv, tile.kv_head,
                  tile.seq.batch, ptx::kEvictLast);
    }
  }
};

// The order in which blocks draw the tiles.
template <class Config>
__device__ inline TileOrder<Config::entries_inside> q_order(const ForwardContext<Config>& c) {
  const Shape& shape = c.params.shape;
  return {q_tiles_of_head<Config>(c.params), static_cast<unsigned>(shape.heads_q),
          static_cast<unsigned>(c.params.head_group)};
}

// The tile `number` if it has keys in its chunk, otherwise the next drawn tile that has.
template <class Config>
__device__ inline int first_with_keys(const ForwardContext<Config>& c,
                                      const TileOrder<Config::entries_inside>& order, int number,
                                      int tiles) {
  while (number < tiles) {
    const KvRange kv = c.tile(q_item_of<Config>(c.params, order, number)).kv;
    if (kv.begin < kv.end) break;
    number = tile_of_ticket(c.params.tile_counter, draw_ticket(c.params.tile_counter), tiles);
  }
  return number;
}

// K of a block is loaded before V of the block before, the order in which the math role uses them.
// The next tile is drawn late, so that a block with a long tile leaves other tiles to blocks that
// are done. It is drawn early enough that the answer is there when the last loads of this tile are
// issued.
template <class Config>
__device__ inline void load_role(const ForwardContext<Config>& c) {
  const Shape& shape = c.params.shape;
  const auto order = q_order(c);
  const int tiles = static_cast<int>(order.tiles) * shape.heads_q * shape.batch;
  ForwardLoader<Config> loader(c);
  int first = static_cast<int>(blockIdx.x);
  if constexpr (Config::Chunks::split) first = first_with_keys(c, order, first, tiles);
  if ((Config::Lengths::packed || Config::Chunks::split) && first >= tiles) {
    loader.pass_on_nothing();
    loader.end();
    return;
  }
  ForwardTile<Config> tile = c.tile(q_item_of<Config>(c.params, order, first));
  loader.pass_on(tile);
  loader.load_k(tile, tile.kv.end - 1);
  loader.load_q(tile);
#pragma unroll 1
  while (true) {
#pragma unroll 1
    for (int block = tile.kv.end - 2; block > tile.kv.begin; --block) {
      loader.load_k(tile, block);
      loader.load_v(tile, block + 1);
    }
    const int ticket = draw_ticket(c.params.tile_counter);
    if (tile.kv.end > tile.kv.begin + 1) {
      loader.load_k(tile, tile.kv.begin);
      loader.load_v(tile, tile.kv.begin + 1);
    }
    int number = tile_of_ticket(c.params.tile_counter, ticket, tiles);
    if constexpr (Config::Chunks::split) number = first_with_keys(c, order, number, tiles);
    if (number >= tiles) break;
    // Where the next tile has to be looked up, V of this one does not wait for the answer.
    if constexpr (Config::Lengths::vary) loader.load_v(tile, tile.kv.begin);
    const ForwardTile<Config> next = c.tile(q_item_of<Config>(c.params, order, number));
    loader.pass_on(next);
    if constexpr (!Config::Lengths::vary) loader.load_v(tile, tile.kv.begin);
    loader.load_k(next, next.kv.end - 1);
    loader.load_q(next);
    tile = next;
  }
  loader.pass_on_nothing();
  loader.load_v(tile, tile.kv.begin);
  loader.end();
}

}  // namespace cuflash::fa3
