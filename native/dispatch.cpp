#include "dispatch.h"

#include "cpu.h"

namespace headwise {

#if defined(HEADWISE_BUILD_X86)
namespace avx512bf16 {
extern const Kernels kernels;
}
namespace avx512 {
extern const Kernels kernels;
}
namespace avx2 {
extern const Kernels kernels;
}
#endif
namespace portable {
extern const Kernels kernels;
}

namespace {

struct Row {
    Isa isa;
    const Kernels* kernels;
};

// Best first.
const Row TABLE[] = {
#if defined(HEADWISE_BUILD_X86)
    {Isa::avx512bf16, &avx512bf16::kernels},
    {Isa::avx512, &avx512::kernels},
    {Isa::avx2, &avx2::kernels},
#endif
    {Isa::portable, &portable::kernels},
};

}  // namespace

std::vector<std::string> runnable() {
    std::vector<std::string> names;
    for (const Row& row : TABLE)
        for (Isa isa : supported())
            if (isa == row.isa) names.emplace_back(name(isa));
    return names;
}

const Kernels* kernels_of(const std::string& wanted) {
    for (const Row& row : TABLE)
        for (Isa isa : supported())
            if (isa == row.isa && name(isa) == wanted) return row.kernels;
    return nullptr;
}

}  // namespace headwise
