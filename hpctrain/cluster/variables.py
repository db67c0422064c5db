"""Variables: what those that sites advise are for, in a few words each, as comments of a batch script."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hpctrain.plan.sourced import Value

MEANINGS = {
    "FI_CXI_DEFAULT_CQ_SIZE": "messages that ended and were not yet looked at",
    "FI_CXI_DEFAULT_TX_SIZE": "messages that may be under way at a time",
    "FI_CXI_DISABLE_HOST_REGISTER": "the GPU's runtime leaves host memory alone",
    "FI_CXI_RDZV_EAGER_SIZE": "bytes that go before the receiver is ready",
    "FI_CXI_RDZV_GET_MIN": "from this size on receivers fetch a message",
    "FI_CXI_RDZV_PROTO": "how long messages are fetched",
    "FI_CXI_RDZV_THRESHOLD": "from this size on a message is long",
    "FI_CXI_RX_MATCH_MODE": "who finds a message's receiver: interface, software or both",
    "FI_MR_CACHE_MONITOR": "how it is noticed that memory was given back",
    "FI_PROVIDER": "the network that libfabric takes",
    "HSA_FORCE_FINE_GRAIN_PCIE": "devices see each other's writes over PCIe",
    "MIOPEN_CUSTOM_CACHE_DIR": "compiled kernels",
    "MIOPEN_USER_DB_PATH": "kernels that were found to be fast",
    "MPICH_GPU_SUPPORT_ENABLED": "whether MPI itself reads the memory of GPUs",
    "MPICH_OFI_NIC_POLICY": "which network interface a rank takes",
    "MPICH_SMP_SINGLE_COPY_MODE": "how MPI copies between ranks of a node",
    "NCCL_CROSS_NIC": "a ring may leave by another interface than it came in by",
    "NCCL_IB_TIMEOUT": "how long InfiniBand waits for an answer",
    "NCCL_NET": "the network plugin",
    "NCCL_NET_GDR_LEVEL": "how near an interface has to be to read a GPU's memory",
    "NCCL_NET_PLUGIN": "the library of the network plugin",
    "NCCL_PROTO": "protocols to choose from",
    "NCCL_SOCKET_IFNAME": "the interfaces over which ranks meet at the start",
}


def words(values: Iterable[Value]) -> Mapping[str, str]:
    """Why a machine's variables are as they are, by name: what its file says beside them, else what they are for."""
    beside = {value.key.rpartition(".")[2]: value.word for value in values if "environment" in value.key and value.word}
    return MEANINGS | beside
