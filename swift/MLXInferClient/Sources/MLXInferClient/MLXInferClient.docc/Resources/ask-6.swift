import MLXInferClient

struct Place: GuidedObject, Decodable, Sendable {
    let city: String

    static var properties: [Property<Place>] {
        Property("city", \.city, .string(maxLength: 40))
    }
}

let weather = CallableTool("weather", "The weather in a city") { (place: Place) in
    "21 degrees in \(place.city)"
}
let client = Client()
let run = try await client.respond(to: ChatRequest([.user("Do I need a coat in Rome?")]), calling: [weather])
print(run.response.text)
