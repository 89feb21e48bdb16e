// Stands for cuda_src/ptx/bulk_copy.cuh. Stores are done at once or when they are waited for.
#pragma once

#include "../emulated.hpp"

namespace cuflash::ptx {

inline void check_bulk(const void* global, unsigned shared, unsigned bytes) {
  if (reinterpret_cast<std::uintptr_t>(global) % 16 != 0 || bytes % 16 != 0 || bytes == 0) {
    emulated::fail("a bulk copy of what is not whole 16 bytes");
  }
  emulated::shared_at(shared, 16);
  emulated::shared_at(shared + bytes - 16, 16);
}

inline void bulk_load(unsigned shared, const void* from, unsigned bytes, unsigned barrier) {
  check_bulk(from, shared, bytes);
  emulated::copy_later(barrier, bytes, [=] {
    emulated::copied(shared, bytes);
    emulated::reads(from, bytes);
    std::memcpy(emulated::shared_base + shared, from, bytes);
  });
}

inline void bulk_store(void* to, unsigned shared, unsigned bytes) {
  check_bulk(to, shared, bytes);
  const auto work = [=] {
    emulated::copied(shared, bytes);
    std::memcpy(to, emulated::shared_base + shared, bytes);
  };
  emulated::current->cleared = true;
  if (emulated::variant() % 2 == 0) {
    work();
  } else {
    emulated::store_later(work);
  }
}

inline void bulk_commit() { emulated::close_stores(); }

inline void bulk_wait() { emulated::wait_for_stores(); }

}  // namespace cuflash::ptx
