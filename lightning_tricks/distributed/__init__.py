"""Layer 0: meshes, sharding, collectives and distributed checkpoints. torch only, no lightning."""
