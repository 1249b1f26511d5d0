// What the modules _core and _cuda hand to each other through Python: C++ objects in capsules. Both modules are built
// together, so both see the same classes.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <string>
#include <utility>

#include "comm/communicator.h"
#include "common/error.h"
#include "optim/device_adam.h"

namespace zb {

template <class T>
inline constexpr const char* kCapsuleName = nullptr;
template <>
inline constexpr const char* kCapsuleName<DeviceParts> = "zerobench.DeviceParts";
template <>
inline constexpr const char* kCapsuleName<std::unique_ptr<Communicator>> = "zerobench.Communicator";

// A capsule that owns the value until take_from_capsule or its end.
template <class T>
pybind11::capsule to_capsule(T value) {
  return pybind11::capsule(new T(std::move(value)), kCapsuleName<T>, [](void* held) { delete static_cast<T*>(held); });
}

// The value of a capsule, which stays in it.
template <class T>
T& in_capsule(const pybind11::object& object) {
  ZB_EXPECT(PyCapsule_IsValid(object.ptr(), kCapsuleName<T>),
            std::string("expected what the other module made as ") + kCapsuleName<T>);
  return *static_cast<T*>(PyCapsule_GetPointer(object.ptr(), kCapsuleName<T>));
}

}  // namespace zb
