import MLXInferClient

struct Capital: Decodable {
    let city: String
    let population: Int
}

let schema: JSONValue = [
    "type": "object",
    "properties": ["city": ["type": "string"], "population": ["type": "integer"]],
    "required": ["city", "population"],
    "additionalProperties": false,
]
let client = Client()
let question = ChatRequest([.user("What is the capital of France, and how many people live there?")])
let capital = try await client.respond(to: question, as: Capital.self, schema: schema)
print(capital.city, capital.population)
