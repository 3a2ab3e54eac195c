// Which kernels run: the best that the CPU has, or the one asked for.
#pragma once

#include <string>
#include <vector>

#include "attention.h"

namespace headwise {

// The compiled instruction sets that this CPU supports, best first.
std::vector<std::string> runnable();

// The kernels of one of `runnable()`, or null.
const Kernels* kernels_of(const std::string& isa);

}  // namespace headwise
