// The copy engine and products of a warpgroup see a thread's writes to shared memory only after a
// fence of that thread. PTX ISA, "Proxies" and "Async proxy".
#pragma once

#include "fibers.hpp"

namespace emulated {

// Bytes of the smallest write of a thread; the writer of each such unit is known.
constexpr unsigned kUnit = 2;

// Notes a write of the current thread.
void wrote(unsigned address, unsigned bytes);

// Notes a write if the address lies in shared memory.
inline void wrote_if_shared(const void* pointer, unsigned bytes) {
  const auto* at = static_cast<const unsigned char*>(pointer);
  if (at < shared_base || at >= shared_base + shared_size) return;
  wrote(static_cast<unsigned>(at - shared_base), bytes);
}

// Shows the current thread's writes to the copy engine and to products.
void fence_shared();

// Whether the copy engine and products see the bytes at an address.
inline bool is_fenced(unsigned address) { return block->writers[address / kUnit] == 0; }

// The same of eight units at most.
template <int units>
bool are_fenced(unsigned address) {
  std::uint64_t words[2] = {};  // a call of memcmp would take longer
  std::memcpy(words, &block->writers[address / kUnit], units * sizeof *block->writers);
  return (words[0] | words[1]) == 0;
}

// Checks the bytes that the copy engine reads or writes.
inline void copied(unsigned address, unsigned bytes) {
  for (unsigned at = address; at < address + bytes; at += kUnit) {
    if (!is_fenced(at)) fail("a copy of or over what a thread wrote, without a fence behind it");
  }
}

}  // namespace emulated
