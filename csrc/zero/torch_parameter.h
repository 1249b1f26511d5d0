// ParameterBinding over a torch tensor: its storage's data pointer is swapped, the tensor object stays the same.
//
// [Note: parameters without data]
// Each parameter gets a StorageImpl of its own over its span. Resharding takes the data pointer away and leaves an
// error message in the storage, so that any access raises a Python exception that names the parameter instead of
// crashing. Tensors that autograd saved share the StorageImpl and see the pointer come back before backward.
//
// Where updates run beside the next forward, a storage keeps its data and raises from the step to the arrival of its
// update, so that a tensor that a script holds from before cannot be read too early.
#pragma once

#include <memory>

#include "zero/unit.h"

namespace at {
class Tensor;
}

namespace zb {

// Throws ArgumentError for tensors that a flat buffer cannot hold (elsewhere than on CPU, the meta device and `device`,
// or not float32, bfloat16 or float16).
std::unique_ptr<ParameterBinding> make_torch_parameter(const std::string& name, const at::Tensor& tensor,
                                                       const std::string& device);

// Ties a binding that make_torch_parameter made to the tensor that took the place of its own, which was on the meta
// device.
void rebind_torch_parameter(ParameterBinding& binding, const at::Tensor& tensor);

}  // namespace zb
