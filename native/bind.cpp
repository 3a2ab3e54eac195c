// The only file here that knows Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <vector>

#include "cpu.h"

namespace nb = nanobind;

NB_MODULE(_native, m) {
    m.doc() = "headwise's native part: what this CPU can run.";
    m.def(
        "supported",
        [] {
            std::vector<std::string> names;
            for (headwise::Isa isa : headwise::supported()) names.emplace_back(headwise::name(isa));
            return names;
        },
        "The instruction sets that this CPU and its operating system support, best first.");
}
