// The readouts of graphs that come chunk by chunk, where weights stand still: of equal rows, of nodes of this chunk or
// of earlier ones, only the first goes through the MLP of its branch. And their class scores.
#pragma once

#include <memory>
#include <vector>

#include "../model.h"
#include "patterns.h"

namespace spin_fast {

class EvaluatedRows {
 public:
  EvaluatedRows(Model model, int64_t room, int64_t bytes) : model(std::move(model)), room(room), bytes(bytes) {}
  virtual ~EvaluatedRows() = default;
  // Writes the readouts [graphs, (R + 1) * h] of `powers` [R + 1, N, d], of at most `room` nodes, and `ptr` [graphs +
  // 1] from 0 to N. By one thread at a time.
  virtual void readout(const void* powers, const int64_t* ptr, int64_t graphs, void* out) = 0;
  // The same of graphs, of at most `room` nodes, by their powers.
  virtual void readout(const GraphRange& graphs, void* out) = 0;
  // By their patterns; false, and nothing is written, where these do not pay.
  virtual bool readout_by_patterns(const GraphRange& graphs, void* out) = 0;

  const Model model;
  const int64_t room, bytes;  // rows of a branch that are remembered, and the size of a value
};

// `parameters`: the flat ones of the branches; `operators`: those that the hops are of, one after the other, or none
// where no graphs come. All rows of a branch are forgotten where those of the next chunk might not fit in.
std::unique_ptr<EvaluatedRows> make_evaluated_rows(const Model& model, const void* parameters, ScalarType value,
                                                   int64_t room, const std::vector<Operator>& operators);

// The class scores [graphs, widths.back()] of readouts [graphs, in], by a classifier with these flat parameters. A
// graph's do not depend on those beside it.
Tensor class_scores(const void* readouts, int64_t graphs, int64_t in, const void* parameters, ScalarType value,
                    const std::vector<int64_t>& widths, double slope);

}  // namespace spin_fast
