import MLXInferClient

struct Trip: GuidedObject, Decodable, Sendable {
    let city: String
    let days: Int

    static var properties: [Property<Trip>] {
        Property("city", \.city, .string(maxLength: 40))
        Property("days", \.days, .integer(in: 1...14))
    }
}

let client = Client()
for try await snapshot in client.stream(Trip.self, "Plan a weekend in Rome. Answer as JSON with city and days.") {
    print(snapshot.content.city ?? "...")
    if let trip = snapshot.value { print(trip.days) }
}
