// Stands for cuda_src/ptx/turn.cuh: blocks run one after the other, so a turn that has not come
// never will.
#pragma once

namespace cuflash::ptx {

inline int read_turn(const int* counter) {
  thread_local const int* last = nullptr;
  thread_local int waited = 0;
  waited = last == counter ? waited + 1 : 0;
  last = counter;
  if (waited > 1000) emulated::fail("a turn that never comes");
  return *counter;
}

inline void pass_turn(int* counter) {
  ++*counter;
}

}  // namespace cuflash::ptx
