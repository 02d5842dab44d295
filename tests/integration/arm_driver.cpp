// Steps Adam on ARM for test_arm.py: a request comes by standard input, its arrays go back by
// standard output. DEEPSPEED_SOURCE is DeepSpeed's own kernel without its part on torch's tensors.

#include DEEPSPEED_SOURCE

#include <cstdio>
#include <vector>
#ifdef __ARM_FEATURE_SVE
#include <arm_sve.h>
#endif

extern "C" int dos_best_set();
extern "C" double dos_adam_step(void*, const void*, void*, void*, void*, int64_t, int64_t, int, int,
                                int, const float*, int, int, int, int, int);

namespace {

enum What : int { kBestSet, kVectorFloats, kCreate, kStock, kOurs };
struct Request {
    int what, grad_type, weight_type, tail_mode, set, master_type, moment_type, adamw;
    int64_t numel, tail, step;
    float numbers[10];
};
Adam_Optimizer* stock;

// As host_adam.cpp numbers types: 0 float, 1 bf16, 2 fp16.
template <typename P, typename S>
void step_as(const Request& r, void* p, void* g, void* m, void* v) {
    stock->Step_8(static_cast<P*>(p), static_cast<P*>(g), static_cast<S*>(m), static_cast<S*>(v),
                  r.numel, false);
}

template <typename P>
void step_master(const Request& r, void* p, void* g, void* m, void* v) {
    if (r.moment_type) step_as<P, P>(r, p, g, m, v);
    else step_as<P, float>(r, p, g, m, v);
}

void step_stock(const Request& r, void* p, void* g, void* m, void* v) {
    const float* n = r.numbers;
    stock->IncrementStep(r.step, n[1], n[2]);
    stock->update_state(n[0], n[3], n[4], true);
    if (r.master_type == 1) step_master<c10::BFloat16>(r, p, g, m, v);
    else if (r.master_type == 2) step_master<c10::Half>(r, p, g, m, v);
    else step_as<float, float>(r, p, g, m, v);
}

int64_t vector_floats() {
#ifdef __ARM_FEATURE_SVE
    return svcntw();
#else
    return 4;
#endif
}

void answer(const Request& r) {
    if (r.what == kCreate) {
        const float* n = r.numbers;
        delete stock;
        stock = new Adam_Optimizer(n[0], n[1], n[2], n[3], n[4], r.adamw);
    }
    if (r.what < kStock) {
        const int64_t found = r.what == kBestSet ? dos_best_set() : vector_floats();
        fwrite(&found, sizeof found, 1, stdout);
        return;
    }
    const int types[] = {r.master_type, r.grad_type, r.moment_type, r.moment_type, r.weight_type};
    std::vector<char> arrays[5];
    for (int i = 0; i < 5; ++i) {
        arrays[i].resize(r.numel * (types[i] ? 2 : 4));
        if (fread(arrays[i].data(), 1, arrays[i].size(), stdin) != arrays[i].size()) return;
    }
    void* at[5];
    for (int i = 0; i < 5; ++i) at[i] = arrays[i].data();
    if (r.what == kStock) step_stock(r, at[0], at[1], at[2], at[3]);
    else
        dos_adam_step(at[0], at[1], at[2], at[3], at[4], r.numel, r.tail, r.grad_type,
                      r.weight_type, r.tail_mode, r.numbers, 1, r.set, 0, r.master_type,
                      r.moment_type);
    for (const auto& array : arrays) fwrite(array.data(), 1, array.size(), stdout);
}

}  // namespace

int main() {
    for (Request request; fread(&request, sizeof request, 1, stdin) == 1; fflush(stdout))
        answer(request);
}
