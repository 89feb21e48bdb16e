// Stands for cuda_src/ptx/turn.cuh. Blocks run one after the other, so a turn that has not come
// never will. The emulator knows which turn a warp has waited for and finds additions out of turn,
// except where other threads keep the turns.
#pragma once

#include "../emulated.hpp"

namespace cuflash::ptx {

inline int read_turn(const int* counter) {
  static const int* last = nullptr;
  static int waited = 0;
  waited = last == counter ? waited + 1 : 0;
  last = counter;
  if (waited > 1000) emulated::fail("a turn that never comes");
  if (!emulated::habits.roles) emulated::warp().turn = counter;
  return *counter;
}

inline void pass_turn(int* counter) {
  if (!emulated::habits.roles && emulated::warp().turn != counter)
    emulated::fail("a turn is passed by whoever does not have it");
  if (emulated::current->cleared) emulated::fail("stores of the copy engine without a fence");
  emulated::warp().turn = nullptr;
  emulated::turns = !emulated::habits.roles;
  ++*counter;
}

}  // namespace cuflash::ptx
