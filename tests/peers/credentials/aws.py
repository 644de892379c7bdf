"""What an agent does with AWS's own client inside a sandbox: it has placeholders and no more."""

import datetime
import os
import sys

import boto3
import botocore.auth
from botocore.config import Config

END = "https://aws.example"
assert os.environ["AWS_ACCESS_KEY_ID"].startswith("AKIA")


def client(service, **more):
    config = Config(retries={"max_attempts": 0}, s3={"addressing_style": "path"}, **more)
    return boto3.client(service, region_name="eu-central-1", endpoint_url=END, config=config)


print("identity", client("sts").get_caller_identity()["Arn"])
s3 = client("s3")
s3.create_bucket(Bucket="box", CreateBucketConfiguration={"LocationConstraint": "eu-central-1"})
for name, size in (("small one.txt", 1024), ("large/object.bin", 8 << 20)):
    body = os.urandom(size)
    s3.put_object(Bucket="box", Key=name, Body=body)
    back = s3.get_object(Bucket="box", Key=name)["Body"].read()
    print("object", size, back == body)
signed = client("s3", signature_version="s3v4", request_checksum_calculation="when_required")
signed.put_object(Bucket="box", Key="signed", Body=b"x" * 4096)
print("listed", sorted(item["Key"] for item in s3.list_objects_v2(Bucket="box")["Contents"]))
vault = client("secretsmanager")
vault.create_secret(Name="a/b", SecretString="{}")
print("secret", vault.get_secret_value(SecretId="a/b")["SecretString"])
late = datetime.timedelta(minutes=-10)
for name in ("get_current_datetime",):
    real = getattr(botocore.auth, name)
    setattr(botocore.auth, name, lambda *a, **k: real(*a, **k) + late)
print("skewed", client("sts").get_caller_identity()["Arn"])
try:
    boto3.client("sts", region_name="us-east-1", endpoint_url=END).get_caller_identity()
    print("another region was signed for")
except Exception as error:  # noqa: BLE001: whatever the client makes of a 403
    print("refused", "signature_refused" in str(error) or "403" in str(error) or type(error).__name__)
sys.stdout.flush()
