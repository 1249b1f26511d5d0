// Counts the bytes of torch's CPU allocator in process_usage(), beside the engine's own.
#pragma once

namespace zb {

// Puts a counting allocator in front of torch's. Call once, before the tensors that shall count; later calls do
// nothing.
void install_counting_allocator();

}  // namespace zb
