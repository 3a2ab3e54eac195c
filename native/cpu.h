// What the CPU under us can run. Knows neither Python nor torch.
#pragma once

#include <string_view>
#include <vector>

namespace headwise {

// Each instruction set that a kernel may be compiled for, best first. `portable` is plain 16-byte
// vectors: NEON on 64-bit Arm, where it belongs to the base instruction set.
enum class Isa { avx512bf16, avx512, avx2, portable };

std::string_view name(Isa isa);

// The sets that both this CPU and its operating system support, best first. The last one is always
// `portable`, so the list is never empty.
std::vector<Isa> supported();

}  // namespace headwise
