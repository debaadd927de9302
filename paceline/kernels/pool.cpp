// The threads of a team: they sleep between passes, and one pass runs at a time.
#include "pool.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

static pthread_mutex_t sleep_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t sleepers = PTHREAD_COND_INITIALIZER;
int num_sleeping = 0;

static Team team;
static Worker workers[MAX_THREADS];
static int num_workers = 0;  // threads that were started, the caller's not counted
static int pass_number = 0;  // even: no pass is open
static int num_inside = 0;   // workers in the open pass
static pid_t owner = 0;
static Work work;            // of the open pass
static void* shared;         // its scratch

static inline void pause_() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

static int64_t now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

constexpr int64_t SPIN_INSIDE = 60000;   // ns within a pass: a phase takes less, unless the system has descheduled a thread
constexpr int64_t SPIN_BETWEEN = 150000;  // ns from one pass to the next

template <class F> static void wait_until(F reached, int64_t spin) {
  int64_t end = 0;
  for (int i = 1; !reached(); i++) {
    if (i > 32) pause_();
    if (i % 128) continue;
    const int64_t time = now();
    if (!end) end = time + spin;
    if (time < end) continue;
    pthread_mutex_lock(&sleep_lock);
    __atomic_add_fetch(&num_sleeping, 1, __ATOMIC_SEQ_CST);
    while (!reached()) pthread_cond_wait(&sleepers, &sleep_lock);
    __atomic_sub_fetch(&num_sleeping, 1, __ATOMIC_SEQ_CST);
    pthread_mutex_unlock(&sleep_lock);
    return;
  }
}

void wait_for(const int* value, int target) {
  wait_until([=] { return __atomic_load_n(value, __ATOMIC_SEQ_CST) == target; }, SPIN_INSIDE);
}

void wake_all() {
  pthread_mutex_lock(&sleep_lock);
  pthread_cond_broadcast(&sleepers);
  pthread_mutex_unlock(&sleep_lock);
}

static void wake_if_needed() {
  if (__atomic_load_n(&num_sleeping, __ATOMIC_SEQ_CST)) wake_all();
}

static void take_part(Worker& me) {
  me.phase = 0;
  work.run(shared, me);
}

static void* serve(void* argument) {
  Worker& me = *(Worker*)argument;
  int seen = 0;
  for (;;) {
    wait_until([&] {
      const int open = __atomic_load_n(&pass_number, __ATOMIC_SEQ_CST);
      return open != seen && open % 2;
    }, SPIN_BETWEEN);
    __atomic_add_fetch(&num_inside, 1, __ATOMIC_SEQ_CST);
    const int open = __atomic_load_n(&pass_number, __ATOMIC_SEQ_CST);
    if (open % 2 && open != seen && me.id < team.threads) take_part(me);
    seen = open;
    if (__atomic_sub_fetch(&num_inside, 1, __ATOMIC_SEQ_CST) == 0) wake_if_needed();
  }
  return nullptr;
}

static void start_workers(int threads) {
  if (owner != getpid()) {  // a fork keeps no threads, nor those that wait
    num_workers = num_sleeping = num_inside = 0, owner = getpid();
    pthread_mutex_init(&sleep_lock, nullptr);
    pthread_cond_init(&sleepers, nullptr);
  }
  while (num_workers + 1 < threads) {
    Worker& one = workers[num_workers + 1];
    one.team = &team;
    one.id = num_workers + 1;
    pthread_t thread;
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    const int failed = pthread_create(&thread, &attributes, serve, &one);
    pthread_attr_destroy(&attributes);
    if (failed) return;  // fewer threads do all the work
    num_workers++;
  }
}

static void* scratch = nullptr;
static int64_t scratch_size = 0;

static void* reserve(int64_t bytes) {
  if (bytes > scratch_size) {
    free(scratch);
    scratch_size = 0;
    if (posix_memalign(&scratch, 4096, bytes)) return scratch = nullptr;
    scratch_size = bytes;
  }
  return scratch;
}

int run_team(int threads, int phases, int64_t bytes, Work given) {
  start_workers(threads);
  team.threads = threads < num_workers + 1 ? threads : num_workers + 1;
  const int64_t counters = (int64_t)phases * (team.threads + 1) * sizeof(Counter);
  char* memory = (char*)reserve(counters + bytes);
  if (!memory) return ENOMEM;
  memset(memory, 0, counters);
  team.next = (Counter*)memory;
  team.done = team.next + (int64_t)phases * team.threads;
  work = given;
  shared = memory + counters;
  if (work.prepare) work.prepare(shared, team.threads);
  workers[0].team = &team;
  workers[0].id = 0;
  if (team.threads == 1) {
    take_part(workers[0]);
    return 0;
  }
  __atomic_add_fetch(&pass_number, 1, __ATOMIC_SEQ_CST);  // open
  wake_if_needed();
  take_part(workers[0]);
  __atomic_add_fetch(&pass_number, 1, __ATOMIC_SEQ_CST);  // closed: workers that arrive now do nothing
  wait_for(&num_inside, 0);
  return 0;
}
