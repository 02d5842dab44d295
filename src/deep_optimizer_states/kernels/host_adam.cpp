// One pass of Adam over host memory: gradient in (16 or 32 bits), unscale, moments, master weight,
// 16-bit weight out. Every rounding is written down: fused multiply-adds are explicit and the
// compiler may not make others (-ffp-contract=off), so the bits do not depend on vector width,
// thread count or optimisation level.
//
// DeepSpeed's CPUAdam handles the elements after the last full vector in scalar code, whose
// contraction the compiler chooses. `tail` and `tail_mode` repeat that.

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace {

constexpr size_t kChunk = 2048;  // elements; the float buffers stay in the first-level cache

struct Scalars {
    float grad_scale;    // multiplies the gradient, rounded on its own
    float beta1;
    float one_minus_beta1;
    float beta2;
    float one_minus_beta2;
    float rsqrt_bias2;   // 1 / sqrt(1 - beta2^t)
    float eps;
    float step_size;     // -lr / (1 - beta1^t)
    float decay;         // AdamW: -lr * weight_decay; Adam: weight_decay; 0: none
    float decoupled;     // 1: AdamW, 0: Adam with L2
};

enum Type : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };
enum TailMode : int { kAsVector = 0, kStateFused = 1, kUnfused = 2 };

inline float bf16_to_float(uint16_t bits) {
    uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &wide, sizeof value);
    return value;
}

inline uint16_t float_to_bf16(float value) {  // round to nearest even
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return value != value ? 0x7fc0u : static_cast<uint16_t>(rounded);
}

void load_gradient(const void* source, int type, size_t at, size_t count, float* out) {
    if (type == kFloat32) {
        std::memcpy(out, static_cast<const float*>(source) + at, count * sizeof(float));
    } else if (type == kBFloat16) {
        const uint16_t* in = static_cast<const uint16_t*>(source) + at;
        for (size_t i = 0; i < count; ++i) out[i] = bf16_to_float(in[i]);
    } else {
        const _Float16* in = static_cast<const _Float16*>(source) + at;
        for (size_t i = 0; i < count; ++i) out[i] = static_cast<float>(in[i]);
    }
}

void store_weights(const float* in, size_t count, void* target, int type, size_t at) {
    if (type == kFloat32) {
        std::memcpy(static_cast<float*>(target) + at, in, count * sizeof(float));
    } else if (type == kBFloat16) {
        uint16_t* out = static_cast<uint16_t*>(target) + at;
        for (size_t i = 0; i < count; ++i) out[i] = float_to_bf16(in[i]);
    } else {
        _Float16* out = static_cast<_Float16*>(target) + at;
        for (size_t i = 0; i < count; ++i) out[i] = static_cast<_Float16>(in[i]);
    }
}

template <int Mode, bool Decay, bool Decoupled>
void adam(float* __restrict p, float* __restrict g, float* __restrict m, float* __restrict v,
          size_t count, const Scalars& s) {
    for (size_t i = 0; i < count; ++i) {
        float grad = g[i] * s.grad_scale;
        float weight = p[i];
        if (Decay && !Decoupled) {
            grad = Mode == kUnfused ? weight * s.decay + grad
                                    : __builtin_fmaf(weight, s.decay, grad);
        }
        float square = grad * grad;
        float first, second;
        if (Mode == kAsVector) {
            first = __builtin_fmaf(grad, s.one_minus_beta1, m[i] * s.beta1);
            second = __builtin_fmaf(square, s.one_minus_beta2, v[i] * s.beta2);
        } else if (Mode == kStateFused) {
            first = __builtin_fmaf(m[i], s.beta1, grad * s.one_minus_beta1);
            second = __builtin_fmaf(v[i], s.beta2, square * s.one_minus_beta2);
        } else {
            first = m[i] * s.beta1 + grad * s.one_minus_beta1;
            second = v[i] * s.beta2 + square * s.one_minus_beta2;
        }
        float root = __builtin_sqrtf(second);
        float denominator = Mode == kUnfused ? root * s.rsqrt_bias2 + s.eps
                                             : __builtin_fmaf(root, s.rsqrt_bias2, s.eps);
        float ratio = first / denominator;
        if (Decay && Decoupled) {
            weight = Mode == kUnfused ? weight + s.decay * weight
                                      : __builtin_fmaf(weight, s.decay, weight);
        }
        p[i] = Mode == kUnfused ? ratio * s.step_size + weight
                                : __builtin_fmaf(ratio, s.step_size, weight);
        m[i] = first;
        v[i] = second;
    }
}

template <int Mode>
void adam_any_decay(float* p, float* g, float* m, float* v, size_t count, const Scalars& s) {
    if (s.decay == 0.0f) adam<Mode, false, false>(p, g, m, v, count, s);
    else if (s.decoupled != 0.0f) adam<Mode, true, true>(p, g, m, v, count, s);
    else adam<Mode, true, false>(p, g, m, v, count, s);
}

}  // namespace

// p, m, v: numel floats, updated in place. gradient: numel of grad_type, read only. weights: numel
// of weight_type, written. tail: first element that DeepSpeed handles in scalar code, numel if none.
extern "C" void dos_adam_step(float* p, const void* gradient, float* m, float* v, void* weights,
                              int64_t numel, int64_t tail, int grad_type, int weight_type,
                              int tail_mode, const float* scalars, int num_threads) {
    Scalars s;
    std::memcpy(&s, scalars, sizeof s);
    const int64_t chunks = (numel + static_cast<int64_t>(kChunk) - 1) / static_cast<int64_t>(kChunk);
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_threads > 1)
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
        const int64_t begin = chunk * static_cast<int64_t>(kChunk);
        const int64_t end = begin + static_cast<int64_t>(kChunk) < numel
                                ? begin + static_cast<int64_t>(kChunk) : numel;
        alignas(64) float g[kChunk];
        load_gradient(gradient, grad_type, begin, end - begin, g);
        const int64_t split = tail < begin ? begin : (tail > end ? end : tail);
        adam_any_decay<kAsVector>(p + begin, g, m + begin, v + begin, split - begin, s);
        if (split < end) {
            float* rest = g + (split - begin);
            const size_t count = static_cast<size_t>(end - split);
            if (tail_mode == kStateFused)
                adam_any_decay<kStateFused>(p + split, rest, m + split, v + split, count, s);
            else if (tail_mode == kUnfused)
                adam_any_decay<kUnfused>(p + split, rest, m + split, v + split, count, s);
            else
                adam_any_decay<kAsVector>(p + split, rest, m + split, v + split, count, s);
        }
        store_weights(p + begin, end - begin, weights, weight_type, begin);
    }
}
