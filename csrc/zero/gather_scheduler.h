// Gathers the units of stage 3: when they are used, ahead of their use, and in one order on all ranks.
//
// [Note: agreed gathers]
// All-gathers must be started in the same order on every rank, whatever the ranks' own modules do. A pass (a forward, a
// backward) works through an agreed sequence of units, recorded in an earlier pass of the same kind:
// - A unit that comes later in the sequence is reached by starting everything before it; what this rank does not
//   need is received and dropped.
// - A unit that does not come any more is wished for: ranks that have finished the sequence exchange wishes, serve all
//   of them together, and exchange again. A rank whose pass has ended takes part with no wish.
// - A pass ends when no rank wishes for anything. Ranks then compare what they gathered; where that differs from the
//   sequence, all adopt the list of the rank that gathered most (the lowest such rank).
// The first pass has an empty sequence and so runs on wishes alone. One small exchange a pass is what the common case
// pays. Where all shards are final by the end of a pass, no rank can have needed another: then the ranks' hosts do
// not wait for each other, and what came of the exchange is read at the end of the next pass.
//
// Passes and their order are in gather_scheduler.cpp, what one unit goes through in gather_unit.cpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "comm/communicator.h"
#include "memory/ledger.h"
#include "stores/store.h"
#include "zero/clock.h"
#include "zero/gather_agreement.h"
#include "zero/gather_slots.h"
#include "zero/unit.h"

namespace zb {

struct GatherOptions {
  bool sharded = false;  // else (stages 0 to 2, or one rank) every call but the bookkeeping of uses is a no-op
  bool reshard = true;   // else units stay unsharded between forward and backward
  std::size_t keep_root_bytes = 0;  // up to this size the root does
  std::size_t prefetch_bytes = 0;
  bool keep_reads = false;  // Unit::reads is wanted
  // Where shards may be final ([Note: final shards]): the lane of reductions and updates. It copies this rank's own
  // part of a unit where the part has at least own_part_beside_bytes.
  std::optional<Lane> own_part_lane = std::nullopt;
  std::size_t own_part_beside_bytes = 0;
};

// [Note: final shards]
// Once all ranks have gathered a shard, all know that it is final: it does not change until the next step, whose norm
// makes the ranks meet after all gathers. So later gathers of it need no meeting (AllGather::is_final): a rank makes
// them alone, when and as often as it likes. A step's updates end with a meeting, too. After that mark all updated
// shards are final at once. The first units of a forward do not wait for it. All ranks agree on which shards are final.
//
// Each rank copies its own part on its device. It does not copy in the lane of gathers, which would wait for the slot
// in addition to its other waits (docs/decisions/0005-peer-communicator.md, "Lanes that wait"). Large parts are copied
// in the lane of reductions, which waits anyway. That lane waits for meetings with the peers, and a host that limits
// the speed would lose time to that in every unit. So small parts, which cost the compute lane a few microseconds, are
// copied there.

// [Note: spliced slots] (spliced_slot.h) needs no copies of own parts at all.

// [Note: staging shards]
// Where the store keeps a master of low-precision parameters, their shard is not kept beside it: it is fetched from the
// store into a staging shard just before each gather, in the gather's lane. Staging shards are taken in turn, and
// gathers are started in one order on all ranks, so a gather's sources are the same buffer on all. One is written again
// when the peers have read it.
class GatherScheduler {
 public:
  GatherScheduler(Device& device, Communicator& communicator, Store& store, Ledger* ledger, std::vector<Unit>& units,
                  std::vector<Parameter>& parameters, CommunicationClock& clock, const GatherOptions& options);

  // Makes slots and staging shards. Collective.
  void reserve_slots();

  void begin_pass(PassKind kind);
  // Returns with the unit unsharded. Outside a pass only units that already are (an explicit gather) are legal.
  void use(std::size_t unit);
  // In a forward that uses the unit without a call of its module: as `use`, and from now on the unit is gathered and
  // released together with the root.
  void use_with_root(std::size_t unit);
  // Called after the module's forward: reshards, unless the next backward needs this unit first.
  void finish_forward(std::size_t unit);
  // Called after the unit's backward on this rank.
  void finish_backward(std::size_t unit);
  // Completes the sequence, serves the others' wishes and agrees on the next sequence. Also after an exception.
  void end_pass();
  bool in_pass() const noexcept { return in_pass_; }
  PassKind pass_kind() const noexcept { return pass_.kind; }

  // Explicit gathers, outside passes, called alike on all ranks. A gathered unit that is pinned stays unsharded until
  // unpinned. Where parameters are replicated only the pins count.
  void gather(const std::vector<std::size_t>& units);
  void pin(const std::vector<std::size_t>& units);
  void unpin(const std::vector<std::size_t>& units);
  void release(std::size_t unit);
  void release_all();

  // Mark after the first half of the last forward.
  const MarkPtr& halfway() const noexcept { return halfway_; }

  bool tracks_final_shards() const noexcept { return options_.own_part_lane.has_value(); }
  // Whether a later gather may meet the peers.
  bool meets() const;
  // Whether the compute lane has come to wait for a copy of an own part that has not run.
  bool awaits_own_part();
  // Records that updated shards are final after this mark, at which the ranks have met.
  void mark_updated_final(const MarkPtr& met);

 private:
  struct Prefetched {
    std::size_t position;
    std::size_t unit;
  };
  struct StagingShard {
    Region region;
    std::vector<WorkPtr> readers;  // gathers that peers may still read it in
  };
  struct StagingClass {
    std::vector<StagingShard> shards;
    std::size_t turn = 0;
  };

  struct Pass {
    PassKind kind = PassKind::kTrainForward;
    std::uint64_t number = 0;
    std::vector<std::size_t> gathered;  // what this rank needed gathered, in order
  };
  // A pass that has ended here, and what the ranks say about it.
  struct EndedPass {
    EndedPass(Pass ended, Communicator& communicator)
        : pass(std::move(ended)), messages(communicator, pass.kind, pass.number, pass.gathered, kNoWish) {}
    Pass pass;
    GatherMessages messages;
  };

  static bool is_at_root(const Unit& unit) { return unit.is_root || unit.goes_with_root; }
  bool is_issued(const Unit& unit) const;
  bool present(std::size_t unit) const { return units_[unit].parameter_state != ParameterState::kSharded; }
  void reserve_staging();
  StagingShard* fetch(const Unit& unit);
  bool all_final(const Unit& unit) const;
  // Where a unit's flats are gathered to, in a spliced slot or in another.
  struct Destinations {
    std::span<const Region> regions;
    bool spliced;
  };
  static Destinations destinations_of(const Unit& unit) { return {unit.gathered, unit.gather_slot.is_spliced()}; }
  static bool lacks_own_part(const FlatBuffer& flat, bool spliced) { return !spliced || !flat.is_spliced; }
  static bool lacks_own_parts(const Unit& unit, bool spliced);
  SlotLease take_slot(std::size_t unit, bool spliced);
  std::vector<WorkPtr> start_into(Unit& unit, const Destinations& into);
  std::optional<Lane> own_part_lane_of(const Unit& unit) const;  // where not the compute lane copies them
  void copy_own_parts(const Unit& unit, const Destinations& into, Lane lane);
  void wait_own_parts(Unit& unit);
  bool leave_spliced_slot(std::size_t unit);
  void drop_gather(Unit& unit) noexcept;
  static void drop_gathered(Unit& unit) noexcept;
  bool is_intact(const Unit& unit) const;
  void expect_intact(const Unit& unit) const;
  // Into a spliced slot, where the unit is and the caller does not mind.
  void start_gather(std::size_t unit, bool spliced = true);
  void serve(std::size_t unit);  // takes part in a gather whose result this rank does not need, if others need it to
  // A unit that is not intact comes out sharded: it is an error where it is used, behind all that peers wait for here.
  void wait_gather(std::size_t unit);
  void wait_works(const Unit& unit, std::span<const WorkPtr> works);
  void attach(std::size_t unit);
  void start_through(std::size_t position);
  void prefetch();
  void drop_prefetched_before(std::size_t position);
  void get_unexpected(std::size_t unit);
  void finish_agreement();
  std::vector<GatherMessage> agree(const Pass& pass, std::int32_t wish);
  void serve_wishes(const std::vector<GatherMessage>& messages);
  std::vector<std::size_t>& sequence_of(PassKind kind) { return sequences_[static_cast<std::size_t>(kind)]; }
  std::vector<std::size_t>& sequence() { return sequence_of(pass_.kind); }

  Device& device_;
  Communicator& communicator_;
  Store& store_;
  CommunicationClock& clock_;
  std::vector<Unit>& units_;
  std::vector<Parameter>& parameters_;
  GatherOptions options_;
  Ledger* ledger_;
  GatherSlots slots_;
  std::map<std::size_t, StagingClass> staging_;  // by size

  std::vector<std::vector<std::size_t>> sequences_{kPassKindNum};
  struct OwnPart {
    MarkPtr awaited;  // the compute lane has come to wait for it
    MarkPtr copied;
  };
  std::deque<OwnPart> own_parts_;  // that the compute lane waits for or will

  bool in_pass_ = false;
  Pass pass_;                          // the running or the last one
  std::unique_ptr<EndedPass> ended_;   // whose agreement is under way
  std::size_t cursor_ = 0;             // next position of the sequence to start
  std::deque<Prefetched> prefetched_;  // started, not yet used
  std::size_t prefetched_bytes_ = 0;
  std::vector<std::size_t> forward_uses_;  // units used in the running forward, in order
  MarkPtr halfway_;
  std::size_t last_forward_unit_ = SIZE_MAX;  // last unit of the last complete training forward
};

}  // namespace zb
