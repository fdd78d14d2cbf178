// Loops that a thread shares with helpers of its own.
//
// A pass has dozens of loops of some microseconds each, with nothing between them. OpenMP's threads
// sleep in between once a process has two teams on few cores (libgomp counts all, idle ones too),
// and waking them takes longer than such a loop. These helpers spin for a while before they sleep,
// and a loop never waits for a sleeping helper.
#pragma once

#include <cstdint>

namespace draftline {

using LoopBody = void (*)(const void* work, int64_t begin, int64_t end);

// Runs body(work, begin, end) for parts of [0, count) of at least `grain`, in parallel on as many
// threads as torch uses in the calling thread. Returns when all parts are done.
void run_parts(int64_t count, int64_t grain, LoopBody body, const void* work);

template <typename Work>
void parallel(int64_t count, int64_t grain, const Work& work) {
  if (count <= grain) {
    if (count > 0) work(int64_t{0}, count);
    return;
  }
  run_parts(
      count, grain,
      [](const void* body, int64_t begin, int64_t end) {
        (*static_cast<const Work*>(body))(begin, end);
      },
      &work);
}

}  // namespace draftline
