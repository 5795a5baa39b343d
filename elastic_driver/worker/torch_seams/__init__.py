"""The private names of torch that this project uses: all of them, and only here.

A private name may change with any release of torch. Each chapter gives the names of one part of
torch other ones to call them by, and has a test that says what is expected of them. Run on torch
2.13.0.

| chapter | of torch |
|---|---|
| `tensors` | tensors, lists of tensors, buckets of gradients |
| `modules` | what a module holds, and the base of batch normalisations |
| `autograd` | backward passes, hooks of optimizers |
| `process_groups` | groups, their backends, gloo |
| `loaders` | the iterators of a `DataLoader` and its processes |
| `scalers` | gradient scalers |
| `saved_files` | the index of a checkpoint that `torch.distributed.checkpoint` reads |
"""
