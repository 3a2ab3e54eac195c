#define HEADWISE_ISA avx512bf16
#define HEADWISE_VECTORS "vec_avx512bf16.h"
#include "isa.inl"
