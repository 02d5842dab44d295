// One pass of Adam over host memory: gradient in (16 or 32 bits), unscale, moments, master weight,
// 16-bit weight out. State of 16 bits is widened, stepped in fp32 and rounded back. Every rounding is
// written down: fused multiply-adds are explicit and the compiler may not make others
// (-ffp-contract=off), so the bits do not depend on vector width, thread count or optimisation level.
//
// DeepSpeed's CPUAdam handles the elements after the last full vector in scalar code, whose
// contraction the compiler chooses. `tail` and `tail_mode` repeat that.

#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#define DOS_HAS_STREAMING_STORES 1
#endif
#if defined(__aarch64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#define DOS_HAS_SVE_SET 1
#endif

namespace {

#ifdef __aarch64__
using Half = __fp16;  // ARM's g++ has no _Float16 before 13
#else
using Half = _Float16;
#endif

// Elements. Short, so that all five arrays stream side by side: with long ones the memory system
// sees one array, then three, then one, and idles in between. Too short, and the calls cost more.
constexpr size_t kChunk = 128;
// Chunks that a thread takes at a time: 2^16 elements, LEAST_PER_THREAD of teams.py.
constexpr int kBlockChunks = 512;

// AdamScalars of adam.py, which says what each is. The caller fills the struct by these names.
#define DOS_SCALARS(FIELD)                                                                      \
    FIELD(grad_scale) FIELD(beta1) FIELD(one_minus_beta1) FIELD(beta2) FIELD(one_minus_beta2)   \
    FIELD(rsqrt_bias2) FIELD(eps) FIELD(step_size) FIELD(decay) FIELD(decoupled)
#define DOS_MEMBER(name) float name;
#define DOS_NAME(name) #name " "

struct Scalars {
    DOS_SCALARS(DOS_MEMBER)
};

enum Type : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };
enum TailMode : int { kAsVector = 0, kStateFused = 1, kUnfused = 2 };

struct Arguments {
    void* p;
    const void* gradient;
    void* m;
    void* v;
    void* weights;
    int64_t tail;
    int grad_type;
    int weight_type;
    int tail_mode;
    int master_type;
    int moment_type;
    Scalars scalars;
};

namespace portable {
#include "host_adam_chunk.inc"
}

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define DOS_HAS_X86_SETS 1
// Not __F16C__: g++ reads the whole file before a pragma may define it.
#define DOS_HAS_F16C 1
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
namespace avx2 {
#include "host_adam_chunk.inc"
}
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c,prefer-vector-width=512")
namespace avx512 {
#include "host_adam_chunk.inc"
}
#pragma GCC pop_options
#endif
#ifdef DOS_HAS_SVE_SET
#pragma GCC push_options
#pragma GCC target("+sve")
namespace sve {
#include "host_adam_chunk.inc"
}
#pragma GCC pop_options
#endif

using Chunk = void (*)(const Arguments&, int64_t, int64_t);
enum Set : int { kBest = -1, kPortable = 0, kAvx2 = 1, kAvx512 = 2, kSve = 3 };

int best_set() {
#ifdef DOS_HAS_X86_SETS
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
        return kAvx512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return kAvx2;
#endif
#ifdef DOS_HAS_SVE_SET
    if (getauxval(AT_HWCAP) & HWCAP_SVE) return kSve;
#endif
    return kPortable;
}

Chunk choose(int set, bool is_probe) {
    if (set < 0) set = best_set();
#ifdef DOS_HAS_X86_SETS
    if (set == kAvx512) return is_probe ? avx512::probe_chunk : avx512::step_chunk;
    if (set == kAvx2) return is_probe ? avx2::probe_chunk : avx2::step_chunk;
#endif
#ifdef DOS_HAS_SVE_SET
    if (set == kSve) return is_probe ? sve::probe_chunk : sve::step_chunk;
#endif
    return is_probe ? portable::probe_chunk : portable::step_chunk;
}

// Returns the seconds that the calling thread waited for the others after its last element.
double run(const Arguments& arguments, int64_t numel, Chunk chunk, int num_threads) {
    using Clock = std::chrono::steady_clock;
    const int64_t size = static_cast<int64_t>(kChunk);
    const int64_t chunks = (numel + size - 1) / size;
    Clock::time_point done;
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
    {
        // Each thread takes another block when it is ready. One that loses its core then delays the
        // others by a block, not by its whole share.
#pragma omp for schedule(dynamic, kBlockChunks) nowait
        for (int64_t i = 0; i < chunks; ++i) {
            const int64_t begin = i * size;
            chunk(arguments, begin, begin + size < numel ? begin + size : numel);
        }
#ifdef DOS_HAS_STREAMING_STORES
        _mm_sfence();  // the weights are in memory before anyone is told that they are
#endif
#pragma omp master
        done = Clock::now();
    }
    return std::chrono::duration<double>(Clock::now() - done).count();
}

}  // namespace

// Best instruction set of this CPU: 0 portable, 1 AVX2 with FMA, 2 AVX-512, 3 SVE.
// All give the same bits.
extern "C" int dos_best_set() { return best_set(); }

// What `scalars` of dos_adam_step holds, in its order, separated by spaces.
extern "C" const char* dos_scalar_names() { return DOS_SCALARS(DOS_NAME); }

// p: numel of master_type, and m, v: numel of moment_type, updated in place. gradient: numel of
// grad_type, read only; it is rounded to master_type before and after it is multiplied by grad_scale.
// weights: numel of weight_type, written from the rounded p. tail: first element that DeepSpeed
// handles in scalar code, numel if none.
// set: as dos_best_set, -1 for the best. probe: touch the same bytes without Adam's arithmetic.
// Returns the seconds that the calling thread waited for the other num_threads - 1 at the end.
extern "C" double dos_adam_step(void* p, const void* gradient, void* m, void* v, void* weights,
                                int64_t numel, int64_t tail, int grad_type, int weight_type,
                                int tail_mode, const float* scalars, int num_threads, int set,
                                int probe, int master_type, int moment_type) {
    Arguments arguments{p,           gradient,  m,           v,           weights, tail, grad_type,
                        weight_type, tail_mode, master_type, moment_type, {}};
    std::memcpy(&arguments.scalars, scalars, sizeof arguments.scalars);
    return run(arguments, numel, choose(set, probe != 0), num_threads);
}
