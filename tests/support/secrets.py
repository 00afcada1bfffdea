"""A marked secret in every spelling, and texts that hold none: what the tests of redaction and the
fuzz target share.
"""

from __future__ import annotations

#: In every secret below. It has the form of none, so that a name or a form must give it away.
MARK = "Mk7QzSEEDx9"
KEY = f"plain{MARK}"

#: What a log may hold, line by line. Each line holds the mark.
BY_NAME = (
    f"vllm serve m --api-key {KEY} second{MARK} --port 8000",
    f"vllm serve m --api-key={KEY} --port 8000",
    f"python -m vllm.entrypoints.openai.api_server --model m --hf-token {KEY}",
    f"--hf_token={KEY}",
    f"['vllm', 'serve', 'm', '--api-key', '{KEY}', 'second{MARK}', '--port', '8000']",
    f'["--api-key={KEY}", "--port", "8000"]',
    f"non-default args: {{'model': 'm', 'api_key': ['{KEY}', 'b{MARK}'], 'max_model_len': 8192}}",
    f"non-default args: {{'api_key': '{KEY}', 'hf_token': '{KEY}', 'block_size': 128}}",
    f"args: Namespace(host=None, api_key=['{KEY}'], hf_token='{KEY}', max_num_seqs=8)",
    f"Namespace(api_key='{KEY}', tokenizer=None)",
    f"LLM(model='m', hf_token='{KEY}', gpu_memory_utilization=0.9)",
    f"SecretStr(password=SecretStr('{KEY}'))",
    f"export HF_TOKEN={KEY}",
    f"HF_TOKEN='{KEY}' VLLM_API_KEY=\"{KEY}\" vllm serve m",
    f"docker run -e HF_TOKEN={KEY} -e HUGGING_FACE_HUB_TOKEN={KEY} image",
    f"ENV HF_TOKEN {KEY}",
    f"HF_TOKEN={KEY}",
    f"environ({{'HOME': '/root', 'HF_TOKEN': '{KEY}', 'WANDB_API_KEY': '{KEY}'}})",
    f"os.environ['OPENAI_API_KEY'] = '{KEY}'",
    f'{{"env": [{{"name": "HF_TOKEN", "value": "{KEY}"}}]}}',
    f'{{"api_key": "{KEY}", "n": 1}}',
    f'{{\\"kv_connector_extra_config\\": {{\\"password\\": \\"{KEY}\\"}}}}',
    f"hf_token: {KEY}",
    f'  api-key: "{KEY}"',
    f"db_password: {KEY} # of the cluster",
    f"Authorization: Bearer {KEY}",
    f'curl -H "Authorization: Bearer {KEY}" http://localhost:8000/v1/models',
    f'curl -H "x-api-key: {KEY}" http://localhost:8000/v1/models',
    f"Cookie: session={KEY}; other={KEY}",
    f"GET /v1/models?api_key={KEY}&model=m HTTP/1.1",
    f"AWS_ACCESS_KEY_ID={KEY} AWS_SECRET_ACCESS_KEY=a/b+{KEY}",
    f"HUAWEICLOUD_SDK_AK={KEY} HUAWEICLOUD_SDK_SK={KEY}",
    f"obs = ObsClient(access_key_id='{KEY}', secret_access_key='{KEY}', server='x')",
    f"obs: ak={KEY}, sk={KEY}",
    f"{{'ak': '{KEY}', 'sk': '{KEY}'}}",
    f"X-Auth-Token: {KEY}",
    f"ValueError: bad value for api_key='{KEY}'",
)
BY_FORM = (
    f"login with hf_{MARK}abcdefghijklmnopqrstuvw",
    f"key sk-proj-{MARK}abcdefghijklmnop in use",
    f"ghp_{MARK}abcdefghijklmnopqrstuvwxyz0123",
    f"github_pat_{MARK}_abcdefghijklmnopqrstuvwxyz",
    f"eyJhbGciOiJIUzI1NiJ9.eyJ{MARK}.{MARK}-sig",
    f"sent 'bearer {KEY}' to the server",
    f"pulling from https://user:{KEY}@registry.example/v2",
    f"git clone https://{KEY}@git.example/x.git",
    f"redis://:{KEY}@10.0.0.1:6379/0",
    f"AKIAIOSFODNN7EXAMPLE,a/{MARK}+{'b' * 26}",
    f"glpat-{MARK}abcdefgh",
)
#: Secrets over several lines.
OVER_LINES = (
    f"vllm serve m --api-key \\\n  {KEY} \\\n  second{MARK} \\\n  --port 8000\n",
    f"vllm serve m --max-model-len 8192 --hf-token\n{KEY}\n",
    f"export HF_TOKEN=abcdefghijklmnopqrstuvwxyz0123456789ABCD\n{MARK}ef --port 8000\n",
    f"Namespace(model='m', api_key=['{KEY}',\n  'second{MARK}'], port=8000)\n",
    f"api-key:\n  - {KEY}\n  - second{MARK}\nport: 8000\n",
    f"- name: HF_TOKEN\n  value: {KEY}\n",
    f"hf_token:\n  {KEY}\nport: 8000\n",
    f"-----BEGIN RSA PRIVATE KEY-----\n{MARK}\n{MARK}\n-----END RSA PRIVATE KEY-----\nport: 8000\n",
)
ALL = (*BY_NAME, *BY_FORM, *OVER_LINES)

#: Figures and set-up that must stay as they are.
HARMLESS = (
    "max_num_batched_tokens=8192, max_tokens=1024, num_tokens: 12, tokenizer='Qwen/Qwen3-8B'",
    "--max-num-batched-tokens 8192 --tokenizer-mode auto --ssl-keyfile /etc/k.pem --seed 0",
    "kv_cache_memory_bytes=34359738368 kv_cache_dtype='auto' num_key_value_heads=8",
    "bos_token_id=151643 eos_token_id: [151645, 151643] pad_token='<|endoftext|>'",
    "'bos_token': '<s>', 'eos_token': '</s>', 'image_token': '<|image_pad|>', 'unk_token': None",
    "bytes per token: 147456; KV cache per token: 144.0 KiB; bytes_per_token=147456",
    "time per output token: 12.5 ms, last token: 151645, token: 5",
    "GPU KV cache size: 645,120 tokens",
    "Avg prompt throughput: 3.0 tokens/s, Avg generation throughput: 1.0 tokens/s",
    "'api_key': None, 'hf_token': None, hf_token=None, api_key=[], trust_remote_code=True",
    "export HF_TOKEN=$HF_TOKEN; vllm serve m --api-key $VLLM_API_KEY --port 8000",
    "Loading safetensors checkpoint shards: 100% Completed | 4/4 [00:01<00:00]",
    "hf_transfer hf_overrides={} hf_config_path=None sk-learn task-0 disk-1 mask=3",
    "torch.distributed init tcp://10.0.0.1:29500 http://localhost:8000/v1 git@github.com:a/b.git",
    "KeyError: 'model.layers.0.mlp.gate' key=value cache_key: 5 secretary passing keys",
    "--kv-transfer-config {\"kv_connector\": \"x\", \"kv_port\": 20001}",
    "commit 2f5ae1c7d9b0e8f34a6c1d2e3f405162738495a6, image sha256:9f86d081884c7d65",
    "HCCL_BUFFSIZE=200 PYTORCH_NPU_ALLOC_CONF=expandable_segments:True OMP_NUM_THREADS=1",
    "peak : 3.2 GiB, peak = 4 GiB, task = 3, disk: 5",
    "vllm: error: argument --api-key: expected at least one argument",
)  # fmt: skip
