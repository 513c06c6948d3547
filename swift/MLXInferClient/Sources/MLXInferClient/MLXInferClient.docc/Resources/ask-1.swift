import MLXInferClient

let client = Client()
let answer = try await client.respond(to: "What is the capital of France?")
print(answer.text)
