// The C interface, and which instruction set runs.
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif
#if defined(__linux__)
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "abi.h"
#include "block_formats.h"
#include "noise.h"
#include "pool.h"

extern "C" int paceline_cpu_has(const char* isa);  // cpu.cpp
#define DECLARE(name)                                                              \
  namespace name {                                                                 \
  int64_t scratch_bytes(const Model*, const Pass*, int threads);                   \
  int num_phases(const Model*);                                                    \
  void prepare(const Model*, const Pass*, void* scratch, int threads);             \
  void run(const Model*, const Pass*, void* scratch, Worker*);                     \
  void multiply(const Matrix*, const float*, int64_t, float*, void*, Worker*);     \
  int64_t multiply_bytes(const Matrix*, int64_t rows);                             \
  int64_t draw(const float* scores, int64_t size, uint64_t key);                   \
  void gumbel(uint64_t key, const int64_t* ids, int64_t count, float* out);        \
  }
DECLARE(portable)
#if defined(PACELINE_HAS_AVX2)
DECLARE(avx2)
#endif
#if defined(PACELINE_HAS_AVX2_VNNI)
DECLARE(avx2_vnni)
#endif
#if defined(PACELINE_HAS_AVX512)
DECLARE(avx512)
#endif
#if defined(PACELINE_HAS_AVX512_VNNI)
DECLARE(avx512_vnni)
#endif
#if defined(PACELINE_HAS_AVX512_BF16)
DECLARE(avx512_bf16)
#endif
#if defined(PACELINE_HAS_AMX)
DECLARE(amx)
#endif
#if defined(PACELINE_HAS_NEON)
DECLARE(neon)
#endif
#if defined(PACELINE_HAS_NEON_DOTPROD)
DECLARE(neon_dotprod)
#endif
#if defined(PACELINE_HAS_NEON_I8MM)
DECLARE(neon_i8mm)
#endif

struct Isa {
  const char* name;
  int64_t (*scratch_bytes)(const Model*, const Pass*, int);
  int (*num_phases)(const Model*);
  void (*prepare)(const Model*, const Pass*, void*, int);
  void (*run)(const Model*, const Pass*, void*, Worker*);
  void (*multiply)(const Matrix*, const float*, int64_t, float*, void*, Worker*);
  int64_t (*multiply_bytes)(const Matrix*, int64_t);
  int64_t (*draw)(const float*, int64_t, uint64_t);
  void (*gumbel)(uint64_t, const int64_t*, int64_t, float*);
  int (*pays_here)();  // 0: a later one is faster here, or nobody knows
  int (*enter)();      // 0: the system does not let this process use it; may be null
};

static int always() { return 1; }
static int untried() { return 0; }  // it never ran on a processor that has it, so only a user who asks for it gets it
#if defined(__x86_64__)
// Linux keeps no room for tiles until a process asks, for all its threads and children; it refuses where a thread's stack
// for signals has no room for them.
static int enter_tiles() {
#if defined(__linux__)
  constexpr int REQUEST = 0x1023, TILE_DATA = 18;
  return !syscall(SYS_arch_prctl, REQUEST, TILE_DATA);
#else
  return 0;
#endif
}

// Intel's product of pairs of bfloat16 takes as long as four products of floats, so that it gains nothing.
static int is_not_intel() {
  unsigned a, b = 0, c, d;
  return !__get_cpuid(0, &a, &b, &c, &d) || b != signature_INTEL_ebx;
}

typedef unsigned Rounding;
constexpr Rounding NEAREST = 0x1f80;
static Rounding rounding() { return _mm_getcsr(); }
static void set_rounding(Rounding mode) { _mm_setcsr(mode); }
#elif defined(__aarch64__)
typedef uint64_t Rounding;
constexpr Rounding NEAREST = 0;
static Rounding rounding() {
  Rounding mode;
  __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
  return mode;
}
static void set_rounding(Rounding mode) { __asm__ volatile("msr fpcr, %0" : : "r"(mode) : "memory"); }
#else
typedef int Rounding;
constexpr Rounding NEAREST = 0;
static Rounding rounding() { return NEAREST; }
static void set_rounding(Rounding) {}
#endif

#define ISA(name, ...) \
  {#name,          name::scratch_bytes,  name::num_phases, name::prepare, name::run, \
   name::multiply, name::multiply_bytes, name::draw,       name::gumbel,  __VA_ARGS__}
static const Isa isas[] = {
#if defined(PACELINE_HAS_AMX)
    ISA(amx, untried, enter_tiles),
#endif
#if defined(PACELINE_HAS_AVX512_BF16)
    ISA(avx512_bf16, is_not_intel),
#endif
#if defined(PACELINE_HAS_AVX512_VNNI)
    ISA(avx512_vnni, always),
#endif
#if defined(PACELINE_HAS_AVX512)
    ISA(avx512, always),
#endif
#if defined(PACELINE_HAS_AVX2_VNNI)
    ISA(avx2_vnni, untried),
#endif
#if defined(PACELINE_HAS_AVX2)
    ISA(avx2, always),
#endif
#if defined(PACELINE_HAS_NEON_I8MM)
    ISA(neon_i8mm, always),
#endif
#if defined(PACELINE_HAS_NEON_DOTPROD)
    ISA(neon_dotprod, always),
#endif
#if defined(PACELINE_HAS_NEON)
    ISA(neon, always),
#endif
    ISA(portable, always),
};
constexpr int NUM_ISAS = sizeof isas / sizeof *isas;
static const Isa* chosen = nullptr;

static bool runs_here(const Isa& isa) { return paceline_cpu_has(isa.name); }

static const Isa& isa() {
  for (int i = 0; !chosen; i++)
    if (runs_here(isas[i]) && isas[i].pays_here()) chosen = &isas[i];
  return *chosen;
}

// One pass runs at a time; callers queue at `gate`.

static pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;

struct Job {
  const Isa* isa;
  const Model* model;
  const Pass* pass;
  const Matrix* matrix;
  const float* in;
  float* out;
  int64_t rows;
};
static Job job;

static void prepare_job(void* scratch, int threads) { job.isa->prepare(job.model, job.pass, scratch, threads); }

static void run_job(void* scratch, Worker& me) {
  const Rounding before = rounding();
  set_rounding(NEAREST);  // in every thread, whatever the caller has set; and nothing is flushed to zero
  if (job.matrix) job.isa->multiply(job.matrix, job.in, job.rows, job.out, scratch, &me);
  else job.isa->run(job.model, job.pass, scratch, &me);
  set_rounding(before);
}

extern "C" {

const char* paceline_source_hash() {
#if defined(PACELINE_SOURCE_HASH)
  return PACELINE_SOURCE_HASH;
#else
  return "";
#endif
}

const char* paceline_isa() { return isa().name; }

// Whether an instruction set was compiled and this processor has it. 2: it is used only where its name is selected.
int paceline_has(const char* name) {
  for (int i = 0; i < NUM_ISAS; i++)
    if (!strcmp(isas[i].name, name) && runs_here(isas[i])) return isas[i].pays_here == untried ? 2 : 1;
  return 0;
}

// Select an instruction set from the next pass on; "" selects the best. 0: there is none of this name here, or the system
// refuses it.
int paceline_select(const char* name) {
  for (int i = 0; i < NUM_ISAS; i++)
    if (*name ? !strcmp(isas[i].name, name) && runs_here(isas[i]) : runs_here(isas[i]) && isas[i].pays_here()) {
      if (isas[i].enter && !isas[i].enter()) return 0;
      pthread_mutex_lock(&gate);
      chosen = &isas[i];
      pthread_mutex_unlock(&gate);
      return 1;
    }
  return 0;
}

int64_t paceline_struct_bytes(int which) {
  const int64_t sizes[] = {sizeof(Matrix), sizeof(Norm),  sizeof(Recurrent), sizeof(Experts),
                           sizeof(Latent), sizeof(Layer), sizeof(Model),     sizeof(Pass)};
  return sizes[which];
}

// 0, or an error number: EINVAL for a token without an embedding or a tree of a wrong size, ERANGE for rows behind the
// cache's last column.
int paceline_run(const Model* model, const Pass* pass, int threads) {
  for (int64_t b = 0; pass->sizes && b < pass->batch; b++)
    if (pass->sizes[b] < 1 || pass->sizes[b] > pass->nodes || (pass->logits && pass->head_rows < pass->nodes)) return EINVAL;
  for (int64_t t = 0; pass->ids && t < pass->batch * pass->nodes; t++)
    if (pass->ids[t] < 0 || pass->ids[t] >= model->vocabulary) return EINVAL;
  for (int64_t b = 0; b < pass->batch; b++)
    if (pass->starts[b] < 0 || pass->starts[b] + pass->old + pass->nodes > pass->capacity) return ERANGE;
  pthread_mutex_lock(&gate);
  job = Job{&isa(), model, pass, nullptr, nullptr, nullptr, 0};
  threads = threads < 1 ? 1 : threads > MAX_THREADS ? MAX_THREADS : threads;
  const int failed = run_team(threads, job.isa->num_phases(model), job.isa->scratch_bytes(model, pass, threads),
                              {prepare_job, run_job});
  pthread_mutex_unlock(&gate);
  return failed;
}

// out [rows, outs] = in [rows, ins] times the matrix, plus its bias.
int paceline_multiply(const Matrix* matrix, const float* in, int64_t rows, float* out, int threads) {
  pthread_mutex_lock(&gate);
  job = Job{&isa(), nullptr, nullptr, matrix, in, out, rows};
  threads = threads < 1 ? 1 : threads > MAX_THREADS ? MAX_THREADS : threads;
  const int failed = run_team(threads, 2, job.isa->multiply_bytes(matrix, rows), {nullptr, run_job});
  pthread_mutex_unlock(&gate);
  return failed;
}

// tokens[r] = argmax of scores[r] + noise, or -1, see `noisy_argmax`. It takes no thread and no lock.
void paceline_draw(const float* scores, int64_t rows, int64_t columns, const int64_t* seeds, const int64_t* positions,
                   int64_t purpose, int64_t* tokens) {
  for (int64_t r = 0; r < rows; r++) {
    tokens[r] = isa().draw(scores + r * columns, columns, noise_key(seeds[r], positions[r], purpose));
  }
}

// out [rows, columns] = the noise of the tokens `ids` [columns], up to rounding. It takes no thread and no lock.
void paceline_gumbel(const int64_t* seeds, const int64_t* positions, int64_t rows, int64_t purpose, const int64_t* ids,
                     int64_t columns, float* out) {
  for (int64_t r = 0; r < rows; r++)
    isa().gumbel(noise_key(seeds[r], positions[r], purpose), ids, columns, out + r * columns);
}

// Where a unit of BF12 holds a word of a pair, see bf12.h.
static int64_t place_of(int64_t word) { return word % 32 / 8 * 16 + word / 32 * 8 + word % 8; }

// BF12 of weights of bfloat16 [outs, ins]: fills `table` [16], `units` and `patches`, which has room for so many
// behind where those of each block begin. Returns how many there are, or -1 if they do not fit.
int64_t paceline_shorten(const uint16_t* weights, int64_t outs, int64_t ins, uint8_t* table, uint8_t* units,
                         int32_t* patches, int64_t room) {
  constexpr int64_t SAMPLE = 1 << 20, MOST_PLACES = 1 << 23;
  const int64_t blocks = (outs + 31) / 32, per_block = (ins + 3) / 4;
  if (128 * per_block > MOST_PLACES) return -1;
  int64_t counts[256] = {}, found = 0;
  for (int64_t i = 0; i < outs * ins; i += 1 + outs * ins / SAMPLE) counts[weights[i] >> 8]++;
  uint8_t code_of[256];
  memset(code_of, 16, 256);
  for (int code = 0; code < 16; code++) {
    int best = 0;
    for (int high = 1; high < 256; high++)
      if (counts[high] > counts[best]) best = high;
    counts[best] = -1;
    code_of[table[code] = (uint8_t)best] = (uint8_t)code;
  }
  memset(units, 0, (size_t)(blocks * per_block * 192));
  for (int64_t block = 0; block < blocks; block++) {
    patches[block] = (int32_t)found;
    for (int64_t u = 0; u < per_block; u++) {
      uint8_t* unit = units + (block * per_block + u) * 192;
      for (int64_t out = 0; out < 32 && block * 32 + out < outs; out++)
        for (int64_t in = 0; in < 4 && 4 * u + in < ins; in++) {
          const int64_t pair = in / 2, word = 2 * out + in % 2, at = place_of(word);
          const uint16_t weight = weights[(block * 32 + out) * ins + 4 * u + in];
          uint8_t code = code_of[weight >> 8];
          if (code == 16) {
            if (found == room) return -1;
            patches[blocks + 1 + found++] = (int32_t)(((2 * u + pair) * 64 + word) << 8 | weight >> 8);
            code = 0;
          }
          unit[64 * pair + at] = (uint8_t)weight;
          unit[128 + at] |= (uint8_t)(code << 4 * pair);
        }
    }
  }
  patches[blocks] = (int32_t)found;
  return found;
}

// The weights of bfloat16 [outs, ins] that `paceline_shorten` was given.
void paceline_widen(const uint8_t* table, const uint8_t* units, const int32_t* patches, int64_t outs, int64_t ins,
                    uint16_t* weights) {
  const int64_t blocks = (outs + 31) / 32, per_block = (ins + 3) / 4;
  for (int64_t out = 0; out < outs; out++)
    for (int64_t in = 0; in < ins; in++) {
      const uint8_t* unit = units + (out / 32 * per_block + in / 4) * 192;
      const int64_t pair = in / 2 % 2, at = place_of(2 * (out % 32) + in % 2);
      weights[out * ins + in] = (uint16_t)(table[unit[128 + at] >> 4 * pair & 15] << 8 | unit[64 * pair + at]);
    }
  for (int64_t block = 0; block < blocks; block++)
    for (int32_t i = patches[block]; i < patches[block + 1]; i++) {
      const int64_t patch = patches[blocks + 1 + i], word = patch >> 8 & 63, in = (patch >> 14) * 2 + word % 2;
      uint16_t& weight = weights[(block * 32 + word / 2) * ins + in];
      weight = (uint16_t)((patch & 255) << 8 | (weight & 255));
    }
}

// Weights of blocks [outs, ins], as a file holds them, as records of sixteen outputs; outputs that are missing from the
// last ones are left as they are. Returns whether all scales are finite.
int paceline_pack_blocks(int format, const uint8_t* blocks, int64_t outs, int64_t ins, uint8_t* packed) {
  const BlockFormat f = block_format(format);
  const int64_t per_row = ins / f.each;
  const int infinity = f.is_bf16 ? 0x7f80 : 0x7c00;
  BlockCodes codes = {};
  int finite = 1;
  for (int64_t first = 0; first < outs; first += COLUMN)
    for (int64_t i = 0; i < per_row; i++, packed += record_bytes(f))
      for (int out = 0; out < COLUMN && first + out < outs; out++) {
        read_block(format, blocks + ((first + out) * per_row + i) * f.bytes, &codes);
        write_record(f, codes, out, packed);
        finite &= (codes.d & infinity) != infinity && (!f.has_mins || (codes.e & infinity) != infinity);
      }
  return finite;
}

// Some outputs of packed blocks in float32 [count, ins].
void paceline_unpack_blocks(int format, const uint8_t* packed, const int64_t* outputs, int64_t count, int64_t ins,
                            float* weights) {
  for (int64_t i = 0; i < count; i++) float_row(format, packed, ins, outputs[i], weights + i * ins);
}

// Bytes of a record, and of a block in a file; 0 for an unknown format.
int64_t paceline_record_bytes(int format) { return record_bytes(block_format(format)); }

// Ask for large pages under the whole pages of a buffer: fewer look-ups while weights are read.
void paceline_advise(void* data, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  const uintptr_t page = sysconf(_SC_PAGESIZE);  // on ARM up to 64 KB
  const uintptr_t first = ((uintptr_t)data + page - 1) & -page, last = ((uintptr_t)data + bytes) & -page;
  if (last > first) madvise((void*)first, last - first, MADV_HUGEPAGE);
#endif
}
}
