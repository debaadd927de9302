// A team of threads that walks through the phases of a pass together.
//
// Each phase is a number of pieces. A thread takes pieces of its own share first, then of the others'; the phase is
// over when all its pieces are done, not when all threads have arrived. So a thread that the system has descheduled
// delays nobody unless it is in the middle of a piece.
#pragma once
#include <stdint.h>

constexpr int MAX_THREADS = 64;
constexpr int LINE = 64;

struct alignas(LINE) Counter { int value; };

struct Team {
  int threads;
  int capacity;        // phases there is room for
  Counter* next;       // [phase][thread], pieces taken of that thread's share
  Counter* done;       // [phase], pieces finished
};

struct Worker {
  Team* team;
  int id;
  int phase;           // phases this worker has gone through
};

// What a team does in a pass: `prepare`, unless it is null, before the others begin, then `run` in every thread.
struct Work {
  void (*prepare)(void* scratch, int threads);
  void (*run)(void* scratch, Worker& me);
};

// Runs it with this much scratch on at most so many threads; one caller at a time. 0, or ENOMEM.
int run_team(int threads, int phases, int64_t bytes, Work work);

void wait_for(const int* value, int target);  // spins, then sleeps
void wake_all();                              // wakes those that sleep in wait_for
extern int num_sleeping;

inline int load_acquire(const int* p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }

template <class F> inline void phase(Worker& me, int pieces, F f) {
  Team& team = *me.team;
  const int index = me.phase++, threads = team.threads;
  if (pieces == 0) return;
  Counter* next = team.next + (int64_t)index * threads;
  int* done = &team.done[index].value;
  int finished = 0;
  for (int turn = 0; turn < threads; turn++) {
    const int owner = (me.id + turn) % threads;
    const int first = (int)((int64_t)pieces * owner / threads), last = (int)((int64_t)pieces * (owner + 1) / threads);
    if (turn && __atomic_load_n(&next[owner].value, __ATOMIC_RELAXED) >= last - first) continue;
    for (;;) {
      const int piece = first + __atomic_fetch_add(&next[owner].value, 1, __ATOMIC_RELAXED);
      if (piece >= last) break;
      f(piece);
      finished++;
    }
  }
  if (finished && __atomic_add_fetch(done, finished, __ATOMIC_SEQ_CST) == pieces) {
    if (__atomic_load_n(&num_sleeping, __ATOMIC_SEQ_CST)) wake_all();
    return;
  }
  if (load_acquire(done) != pieces) wait_for(done, pieces);
}
