#include "cpu.h"

#include <cstdint>

#if defined(__x86_64__) || defined(_M_X64)
#define HEADWISE_X86 1
#if defined(_MSC_VER)
#include <intrin.h>
#else
#include <cpuid.h>
#endif
#endif

namespace headwise {

std::string_view name(Isa isa) {
    switch (isa) {
        case Isa::avx512bf16: return "avx512bf16";
        case Isa::avx512: return "avx512";
        case Isa::avx2: return "avx2";
        case Isa::portable: return "portable";
    }
    return "portable";
}

#if defined(HEADWISE_X86)

namespace {

struct Registers {
    std::uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
};

// All zero where the CPU does not know the leaf.
Registers cpuid(std::uint32_t leaf, std::uint32_t subleaf) {
    Registers r;
#if defined(_MSC_VER)
    int highest[4], out[4];
    __cpuid(highest, 0);
    if (static_cast<std::uint32_t>(highest[0]) < leaf) return r;
    __cpuidex(out, static_cast<int>(leaf), static_cast<int>(subleaf));
    r = {static_cast<std::uint32_t>(out[0]), static_cast<std::uint32_t>(out[1]),
         static_cast<std::uint32_t>(out[2]), static_cast<std::uint32_t>(out[3])};
#else
    __get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx);
#endif
    return r;
}

// Which register files the operating system saves when it switches threads (XCR0).
std::uint64_t saved_state() {
#if defined(_MSC_VER)
    return _xgetbv(0);
#else
    // By hand: the intrinsic would need -mxsave for this whole file.
    std::uint32_t low = 0, high = 0;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (static_cast<std::uint64_t>(high) << 32) | low;
#endif
}

constexpr bool has(std::uint32_t word, int bit) { return ((word >> bit) & 1U) != 0; }

}  // namespace

std::vector<Isa> supported() {
    std::vector<Isa> found;
    const Registers one = cpuid(1, 0);
    // OSXSAVE guards xgetbv itself: without it the instruction faults.
    if (has(one.ecx, 27)) {
        const std::uint64_t state = saved_state();
        // A CPU bit alone is not enough: under an old kernel or hypervisor the upper halves of the
        // vector registers are lost between threads.
        const bool ymm = (state & 0x06) == 0x06;
        const bool zmm = (state & 0xE6) == 0xE6;
        const Registers seven = cpuid(7, 0);
        const bool avx = has(one.ecx, 28), fma = has(one.ecx, 12), f16c = has(one.ecx, 29);
        const bool avx2 = ymm && avx && fma && f16c && has(seven.ebx, 5);
        // F, DQ, BW and VL: what every server core since 2017 with AVX-512 has.
        const bool avx512 = avx2 && zmm && has(seven.ebx, 16) && has(seven.ebx, 17) &&
                            has(seven.ebx, 30) && has(seven.ebx, 31);
        // Dot products of bfloat16 pairs and (VNNI) of byte quads: no CPU has only the first.
        const bool bf16 = avx512 && has(seven.ecx, 11) && seven.eax >= 1 && has(cpuid(7, 1).eax, 5);
        if (bf16) found.push_back(Isa::avx512bf16);
        if (avx512) found.push_back(Isa::avx512);
        if (avx2) found.push_back(Isa::avx2);
    }
    found.push_back(Isa::portable);
    return found;
}

#else

std::vector<Isa> supported() { return {Isa::portable}; }

#endif

}  // namespace headwise
